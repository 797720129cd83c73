"""TODO llm_core/structured."""

from llm_core.structured.constraint import GuideCompiler, GuideState

__all__ = [
    "GuideCompiler",
    "GuideState",
]
