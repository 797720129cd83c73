"""Chat templates, and tool calls in prompts and replies."""

from llm_core.chat.template import ChatTemplate, PromptPiece
from llm_core.chat.tool_parser import (
    ToolArguments,
    ToolCallEnd,
    ToolCallParser,
    ToolCallStart,
    ToolEvent,
    ToolText,
)

__all__ = [
    "ChatTemplate",
    "PromptPiece",
    "ToolArguments",
    "ToolCallEnd",
    "ToolCallParser",
    "ToolCallStart",
    "ToolEvent",
    "ToolText",
]
