"""How tools, their calls and their results are put before a model.

A template that has ``tools`` among its variables, and writes calls in a form that ``tool_calls``
reads, gets them as Hugging Face templates expect them. For all others they are told in words that
any chat model can follow, in the form of the Hermes models: the functions at the end of the system
message, a call as ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` in the assistant's
text, and a result in plain words of the user's. (In the tags that models are trained on, a small
model that was not takes a result for something to write itself: of eight results the embedded one
passed on none, in plain words four.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from llm_core.errors import InvalidRequestError
from llm_core.messages import ChatMessage, ToolCall, ToolFormat, ToolSpec

Row = dict[str, Any]

_HOW_TO_CALL = """You may call functions. These are known, one a line:
<tools>
{tools}
</tools>
To call one, answer only with its name and arguments, as JSON in these tags:
<tool_call>
{{"name": "NAME", "arguments": {{"PARAMETER": "VALUE"}}}}
</tool_call>
You are then told the result. If no function helps, answer in words."""


def format_of(source: str, knows_tools: bool) -> ToolFormat | None:
    """How calls look in a template's own form; None when it has none, or one we cannot read."""
    if not knows_tools:
        return None
    if "<tool_call>" in source:
        return "hermes"
    return "llama3" if "ipython" in source and '"parameters"' in source else None


def uses_tools(messages: Sequence[ChatMessage]) -> bool:
    return any(m.role == "tool" or m.tool_calls or m.tools for m in messages)


def check_tools(messages: Sequence[ChatMessage]) -> None:
    """Raises InvalidRequestError for tools that do not stand where the prompt begins."""
    if any(m.tools for m in messages[1:]):
        raise InvalidRequestError("tools: only the first message may offer tools")


def in_words(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The same conversation without any tools, calls or tool messages: only text."""
    told: list[ChatMessage] = []
    names = {call.call_id: call.name for message in messages for call in message.tool_calls}
    after_result = False
    if messages[0].tools:
        system = messages[0].content if messages[0].role == "system" else ""
        told.append(ChatMessage("system", _with_tools(system, messages[0].tools)))
    for message in messages[1:] if told and messages[0].role == "system" else messages:
        if message.role == "tool":
            name = names.get(message.call_id, "the function")
            text = f"The result of {name} is:\n{message.content}"
            if after_result:
                text = f"{told.pop().content}\n{text}"
            told.append(ChatMessage("user", text))
        else:
            calls = [_call_text(call) for call in message.tool_calls]
            parts = [message.content, *calls] if message.content else calls
            told.append(ChatMessage(message.role, "\n".join(parts)))
        after_result = message.role == "tool"
    return told


def as_rows(
    messages: Sequence[ChatMessage], change: Callable[[str], str] = str
) -> tuple[list[Row], list[Row] | None]:
    """Messages and tools as Hugging Face templates expect them, with every text of a caller's (but
    none of ours, as "role") put through ``change``."""
    tools = [_tool_row(tool, change) for tool in messages[0].tools] or None
    if tools and messages[0].role == "system" and not messages[0].content:
        messages = messages[1:]  # it stood there for the tools alone
    return [_message_row(message, change) for message in messages], tools


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """``value`` (of JSON's types) with every string in it, keys too, changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(k): _map_strings(v, change) for k, v in value.items()}
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    return value


def _with_tools(system: str, tools: Sequence[ToolSpec]) -> str:
    lines = [json.dumps(_tool_row(tool)["function"], ensure_ascii=False) for tool in tools]
    how = _HOW_TO_CALL.format(tools="\n".join(lines))
    return f"{system}\n\n{how}" if system else how


def _call_text(call: ToolCall) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {call.arguments or "{}"}}}\n</tool_call>'


def _tool_row(tool: ToolSpec, change: Callable[[str], str] = str) -> Row:
    function = {
        "name": change(tool.name),
        "description": change(tool.description),
        "parameters": _map_strings(_parsed(tool.parameters), change),
    }
    return {"type": "function", "function": function}


def _message_row(message: ChatMessage, change: Callable[[str], str]) -> Row:
    row: Row = {"role": message.role, "content": change(message.content)}
    if message.tool_calls:
        row["tool_calls"] = [
            {
                "id": change(call.call_id),
                "type": "function",
                "function": {
                    "name": change(call.name),
                    "arguments": _map_strings(_parsed(call.arguments), change),
                },
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        row["tool_call_id"] = change(message.call_id)
    return row


def _parsed(text: str) -> Any:
    """JSON text as a value; what is no JSON stays text: a model may have written it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
