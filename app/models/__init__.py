"""Named models: catalogue, download, verification, local files."""

from app.models.store import FetchProgress, FetchStage, ModelEntry, ModelStatus, ModelStore

__all__ = [
    "FetchProgress",
    "FetchStage",
    "ModelEntry",
    "ModelStatus",
    "ModelStore",
]
