"""The messages and tools of a chat request: validation, and what the model gets of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, StringConstraints

from app.api.validation import AtMost, WireModel, invalid, only
from app.errors import ClientError
from llm_core import ChatMessage, ToolCall, ToolSpec

MAX_MESSAGES = 4_096
MAX_TOOLS = 128
# Of one message: its parts, and its annotations, which are ignored.
MAX_PARTS = 4_096
# As UTF-8. The engine takes 32,768 characters, of which none has more than four bytes.
MAX_SCHEMA_BYTES = 128 * 1024

FunctionName = Annotated[
    str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")
]


def _small_schema(value: Any) -> Any:
    if isinstance(value, dict) and len(msgspec.json.encode(value)) > MAX_SCHEMA_BYTES:
        raise invalid(f"expected a JSON schema of at most {MAX_SCHEMA_BYTES} bytes")
    return value


Schema = Annotated[dict[str, Any], AtMost(1024), BeforeValidator(_small_schema)]


def _parts(content: Any) -> Any:
    """A string stands for one part of text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class TextPart(WireModel):
    """``{"type": "text", "text": ...}``."""

    type: Annotated[str, only("text", what="Only parts of type 'text': this model reads text.")]
    text: str


class FunctionCall(WireModel):
    """What the model called. ``arguments`` is JSON text."""

    name: FunctionName
    arguments: str
    parsed_arguments: Any = None  # the openai client's own addition


class WireToolCall(WireModel):
    """A call in an assistant's message."""

    id: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(WireModel):
    """One message of any role; what a role needs is checked by ``to_messages``.

    The openai client sends an assistant's message back with everything that it came with, so the
    fields of answers are taken, and ignored, here.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[list[TextPart], AtMost(MAX_PARTS)] | None, BeforeValidator(_parts)
    ] = None
    name: str | None = None
    tool_calls: Annotated[list[WireToolCall], AtMost(MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], AtMost(MAX_PARTS)] | None = None
    audio: Annotated[None, only(None, what="This model hears no audio.")] = None
    function_call: Annotated[None, only(None, what="Use 'tool_calls'.")] = None
    parsed: Any = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or ())


class Function(WireModel):
    """A function that the model may call. ``parameters`` is a JSON Schema."""

    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(WireModel):
    """``{"type": "function", "function": {...}}``."""

    type: Annotated[str, only("function", what="Only tools of type 'function'.")]
    function: Function


Messages = Annotated[list[Message], AtMost(MAX_MESSAGES, least=1)]
Tools = Annotated[list[Tool], AtMost(MAX_TOOLS)] | None


def to_tools(tools: Iterable[Tool]) -> tuple[ToolSpec, ...]:
    """Raises ClientError for a name that is used twice."""
    specs: dict[str, ToolSpec] = {}
    for at, tool in enumerate(tools):
        function = tool.function
        if function.name in specs:
            raise ClientError(
                f"Invalid value for 'tools[{at}].function.name': {function.name!r} is used twice.",
                code="invalid_value",
                param=f"tools[{at}].function.name",
            )
        specs[function.name] = ToolSpec(
            name=function.name,
            description=function.description or "",
            # A property is needed for nobody: without any the function takes no arguments.
            parameters=json.dumps(
                function.parameters or {"type": "object", "properties": {}}, ensure_ascii=False
            ),
            strict=bool(function.strict),
        )
    return tuple(specs.values())


def to_messages(messages: Sequence[Message], tools: tuple[ToolSpec, ...]) -> list[ChatMessage]:
    """What the engine renders. Raises ClientError for messages that do not fit their roles."""
    told: list[ChatMessage] = []
    calls: set[str] = set()
    for at, message in enumerate(messages):
        _check_fields(message, f"messages[{at}]", calls)
        calls |= {call.id for call in message.tool_calls or ()}
        told.append(
            ChatMessage(
                "system" if message.role == "developer" else message.role,
                message.text,
                tool_calls=tuple(
                    ToolCall(
                        call_id=call.id,
                        name=call.function.name,
                        arguments=call.function.arguments,
                    )
                    for call in message.tool_calls or ()
                ),
                call_id=message.tool_call_id or "",
            )
        )
    if not tools:
        return told
    first = told[0] if told[0].role == "system" else ChatMessage("system", "")
    rest = told[1:] if told[0].role == "system" else told
    return [ChatMessage("system", first.content, tools=tools), *rest]


def _check_fields(message: Message, path: str, calls: set[str]) -> None:
    if message.tool_calls is not None and message.role != "assistant":
        raise wrong(f"{path}.tool_calls", "only a message of role 'assistant' has tool calls")
    if message.tool_call_id is not None and message.role != "tool":
        raise wrong(f"{path}.tool_call_id", "only a message of role 'tool' has one")
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        raise wrong(f"{path}.content", "a text is needed", code="missing_required_parameter")
    if message.role == "tool" and message.tool_call_id not in calls:
        raise wrong(
            f"{path}.tool_call_id",
            "a message of role 'tool' must answer a call in a message before it",
        )


def wrong(param: str, what: str, code: str = "invalid_value") -> ClientError:
    """The error for ``param``, of which ``what`` says what it must be."""
    return ClientError(f"Invalid value for '{param}': {what}.", code=code, param=param)
