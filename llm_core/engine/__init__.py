"""The engine: requests in, steps, events out."""

from llm_core.engine.engine import Engine, Output

__all__ = [
    "Engine",
    "Output",
]
