"""TODO llm_core/engine."""

from llm_core.engine.engine import Engine, Output

__all__ = [
    "Engine",
    "Output",
]
