"""Parley's LLM core: an engine in its own process, and the client that talks to it.

This root is all that other packages import. It loads no torch: only the engine process does.
"""

from llm_core.client import EngineClient
from llm_core.errors import (
    EngineBusyError,
    EngineDiedError,
    InvalidRequestError,
    LlmError,
    ModelLoadError,
    PromptTooLongError,
    RequestTimeoutError,
)
from llm_core.messages import (
    ChatMessage,
    EngineConfig,
    EngineStats,
    FinishReason,
    FirstToken,
    GenerationDone,
    GenerationEvent,
    ModelInfo,
    PrefillResult,
    RequestOptions,
    SamplingParams,
    TextDelta,
    Usage,
)

__all__ = [
    "ChatMessage",
    "EngineBusyError",
    "EngineClient",
    "EngineConfig",
    "EngineDiedError",
    "EngineStats",
    "FinishReason",
    "FirstToken",
    "GenerationDone",
    "GenerationEvent",
    "InvalidRequestError",
    "LlmError",
    "ModelInfo",
    "ModelLoadError",
    "PrefillResult",
    "PromptTooLongError",
    "RequestOptions",
    "RequestTimeoutError",
    "SamplingParams",
    "TextDelta",
    "Usage",
]
