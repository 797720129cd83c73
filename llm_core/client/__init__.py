"""The asynchronous front of the engine process."""

from llm_core.client.engine_client import EngineClient, Reply
from llm_core.client.heartbeat import period_s

__all__ = ["EngineClient", "Reply", "period_s"]
