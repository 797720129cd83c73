"""TODO app/models."""

from app.models.store import FetchProgress, FetchStage, ModelEntry, ModelStatus, ModelStore

__all__ = [
    "FetchProgress",
    "FetchStage",
    "ModelEntry",
    "ModelStatus",
    "ModelStore",
]
