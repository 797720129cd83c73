"""Which engine answers a request: the main engine or a canary."""

from app.routing.canary_denylist import FILE_NAME, Withdrawals
from app.routing.canary_router import Rollout, asked_facts, model_id, served_facts
from app.routing.engines import LlmEngine, LlmReply

__all__ = [
    "FILE_NAME",
    "Rollout",
    "LlmEngine",
    "LlmReply",
    "Withdrawals",
    "asked_facts",
    "model_id",
    "served_facts",
]
