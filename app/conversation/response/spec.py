"""What a client wants of one response, and what the session's own configuration makes of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.conversation.events import Item, Response
from app.conversation.history import History
from app.conversation.ids import new_id
from app.conversation.session_config import Modality, SessionConfig, Tool, ToolChoice
from app.conversation.tools import ToolBox
from app.errors import ClientError
from app.observe import TurnTrace
from llm_core import ChatMessage


@dataclass(frozen=True, slots=True)
class ResponseSpec:
    """What one answer is made from, and what is told and kept of it."""

    config: SessionConfig
    messages: list[ChatMessage]
    response: Response
    trace: TurnTrace


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """None leaves it to the session. ``items``: answer these instead of the conversation."""

    modality: Modality | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    tools: tuple[Tool, ...] | None = None
    tool_choice: ToolChoice | None = None
    items: tuple[Item, ...] | None = None

    def asked(
        self,
        history: History,
        config: SessionConfig,
        tools: ToolBox,
        session_id: str,
        *,
        messages: list[ChatMessage] | None = None,
        in_conversation: bool = True,
    ) -> ResponseSpec:
        """A response that is not begun. ``messages``: the prompt, if it is not ``history``'s."""
        config = self._applied_to(config)
        if messages is None:
            messages = self.messages(history, config, tools)
        response = Response(
            new_id("resp"),
            self.modality or config.modality,
            max_output_tokens=self.max_output_tokens or config.max_output_tokens,
            metadata=self.metadata,
            in_conversation=in_conversation,
        )
        return ResponseSpec(
            config, messages, response, TurnTrace(new_id("turn"), session_id, response.id)
        )

    def _applied_to(self, config: SessionConfig) -> SessionConfig:
        if self.instructions is not None:
            config = replace(config, instructions=self.instructions)
        if self.tools is not None:
            config = replace(config, tools=self.tools)
        if self.tool_choice is not None:
            config = replace(config, tool_choice=self.tool_choice)
        return config

    def messages(
        self, history: History, config: SessionConfig, tools: ToolBox
    ) -> list[ChatMessage]:
        """The prompt, under a ``config`` that has the request's own wishes already."""
        if self.items is not None:
            history = History.of(self.items)
        return history.messages(config.instructions, tools.specs(config))


def response_is_active() -> ClientError:
    """The refusal of a second response at the same time."""
    return ClientError(
        "the conversation already has an active response; wait for response.done or cancel it",
        code="conversation_already_has_active_response",
    )


def no_active_response(response_id: str | None) -> ClientError:
    """The refusal to cancel what does not run."""
    return ClientError(
        "Cancellation failed: no active response found"
        + (f" with the id {response_id!r}" if response_id else ""),
        code="response_cancel_not_active",
        param="response_id" if response_id else None,
    )
