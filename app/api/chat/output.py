"""The engine's events as OpenAI's objects: whole completions, and chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

import app as app_package
from app.api.chat.request import Chat
from llm_core import (
    GenerationDone,
    TextDelta,
    TokenLogprob,
    ToolArguments,
    ToolCallEnd,
    ToolCallParser,
    ToolCallStart,
    ToolEvent,
    ToolFormat,
    ToolText,
    Usage,
)

Wire = dict[str, Any]


class ChatOutput:
    """One answer. Feed it every TextDelta, then ``finish``.

    Both give pieces of the message, in the shape of a stream's ``delta``; ``whole`` is their sum.
    """

    def __init__(self, chat: Chat, model: str, tool_format: ToolFormat) -> None:
        self._chat = chat
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"parley-{app_package.__version__}",
        }
        names = [tool.name for tool in chat.tools]
        self._parser = ToolCallParser(tool_format, names) if names else None
        self._text: list[str] = []
        self._calls: list[Wire] = []
        self._logprobs: list[Wire] = []
        self._num_streamed_logprobs = 0

    @property
    def is_over(self) -> bool:
        """The model has begun to make the same calls again: whatever follows is not wanted."""
        return self._parser is not None and self._parser.is_repeating

    def feed(self, delta: TextDelta) -> list[Wire]:
        """What is certain after more text."""
        self._logprobs += [_logprob(entry) for entry in delta.logprobs]
        if self._parser is None:
            return list(self._pieces([ToolText(delta.text)]))
        return list(self._pieces(self._parser.feed(delta.text)))

    def finish(self) -> list[Wire]:
        """The rest, when the reply has ended."""
        return [] if self._parser is None else list(self._pieces(self._parser.flush()))

    def chunk(
        self, delta: Wire | None, *, finish_reason: str | None = None, usage: Usage | None = None
    ) -> Wire:
        """A chunk of a stream; without a ``delta`` it has no choices, only the counts."""
        chunk: Wire = {**self._head, "object": "chat.completion.chunk", "choices": []}
        if delta is not None:
            new = self._logprobs[self._num_streamed_logprobs :]
            self._num_streamed_logprobs = len(self._logprobs)
            choice: Wire = {"index": 0, "delta": delta, "finish_reason": finish_reason}
            choice["logprobs"] = {"content": new, "refusal": None} if new else None
            chunk["choices"] = [choice]
        if self._chat.usage_at_end or self._chat.usage_always:
            chunk["usage"] = None if usage is None else usage_of(usage)
        return chunk

    def whole(self, done: GenerationDone) -> Wire:
        """The completion, of all that was fed."""
        text = "".join(self._text)
        message: Wire = {
            "role": "assistant",
            "content": None if self._calls and not text else text,
            "refusal": None,
            "annotations": [],
        }
        if self._calls:
            message["tool_calls"] = self._calls
        wants_logprobs = self._chat.params.logprobs is not None
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": self._logprobs, "refusal": None} if wants_logprobs else None,
            "finish_reason": self.finish_reason(done),
        }
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage_of(done.usage),
        }

    def finish_reason(self, done: GenerationDone) -> str:
        """``tool_calls`` when the reply ended by itself and has some."""
        return "tool_calls" if self._calls and done.finish_reason == "stop" else done.finish_reason

    def _pieces(self, events: list[ToolEvent]) -> Iterator[Wire]:
        for event in events:
            match event:
                case ToolText(text):
                    self._text.append(text)
                    yield {"content": text}
                case ToolCallStart(index, call_id, name):
                    function = {"name": name, "arguments": ""}
                    self._calls.append({"id": call_id, "type": "function", "function": function})
                    # A copy: what was streamed does not grow any more.
                    call = {**self._calls[-1], "index": index, "function": {**function}}
                    yield {"tool_calls": [call]}
                case ToolArguments(index, delta):
                    self._calls[index]["function"]["arguments"] += delta
                    yield {"tool_calls": [{"index": index, "function": {"arguments": delta}}]}
                case ToolCallEnd():
                    pass  # OpenAI has no event for it


def usage_of(usage: Usage) -> Wire:
    """Counts in OpenAI's shape; ``unseen_tokens`` beside them where a window has left some."""
    return {
        **({"unseen_tokens": usage.unseen_tokens} if usage.unseen_tokens else {}),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def _logprob(entry: TokenLogprob) -> Wire:
    return {
        **_token(entry.token, entry.logprob),
        "top_logprobs": [_token(other.token, other.logprob) for other in entry.top],
    }


def _token(token: bytes, logprob: float) -> Wire:
    # JSON has no infinity; OpenAI writes -9999 for what has no probability at all.
    return {
        "token": token.decode("utf-8", errors="replace"),
        "logprob": max(logprob, -9999.0),
        "bytes": list(token),
    }
