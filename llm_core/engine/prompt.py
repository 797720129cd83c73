"""Messages to prompt tokens that fit, or a clear error. Long conversations lose their oldest turns.

What is left out depends on the conversation's length in coarse steps, so that a growing one keeps
the same beginning for many turns and its cached prefix stays of use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from llm_core.chat import ChatTemplate
from llm_core.errors import InvalidRequestError, PromptTooLongError
from llm_core.messages import ChatMessage, Overflow
from llm_core.scheduling import common_prefix_len
from llm_core.tokenizer import Tokenizer

# A token of a BPE vocabulary is rarely longer; a text above this many bytes a token of context is
# refused before time is spent on encoding it.
_MAX_BYTES_PER_TOKEN = 64
# Speech and prose have about four. A longer text is first encoded in slices, as far as the context
# reaches: all streams wait while a prompt is encoded, and some texts have a token a byte.
_USUAL_BYTES_PER_TOKEN = 8
_SLICE_CHARS = 8192
# A slice may have some tokens more than its part of the whole; what is clearly too long is refused.
_CLEARLY = 1.25


@dataclass(frozen=True, slots=True)
class Prompt:
    """``num_dropped``: messages left out."""

    token_ids: list[int]
    num_dropped: int = 0


class PromptBuilder:
    """Renders and encodes for one model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, max_context: int) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._max_context = max_context

    def build(
        self,
        messages: Sequence[ChatMessage],
        *,
        reply_len: int,
        overflow: Overflow = "refuse",
        retention_ratio: float = 0.75,
        continues_last: bool = False,
    ) -> Prompt:
        """A prompt that leaves room for ``reply_len`` tokens. It ends with the header of the reply,
        or, with ``continues_last``, within the last message. See ``RequestOptions`` for the others.

        Raises InvalidRequestError, and PromptTooLongError: when refused, or when the system prompt
        and the last turn alone are too long.
        """
        if overflow == "drop_oldest" and messages:
            return self._shortened(messages, reply_len, retention_ratio, continues_last)
        self._check_bytes(messages)
        token_ids = self.encode(messages, continues_last)
        self._check_length(len(token_ids), reply_len)
        return Prompt(token_ids)

    def encode(self, messages: Sequence[ChatMessage], continues_last: bool = False) -> list[int]:
        """All tokens; see ``build``. Raises InvalidRequestError."""
        render = self._template.render_open if continues_last else self._template.render
        token_ids = self._tokenizer.encode_pieces(render(messages))
        if not token_ids:
            raise InvalidRequestError("messages: the prompt is empty")
        return token_ids

    def shared_prefix(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The tokens with which every conversation begins that starts with ``messages``."""
        self._check_bytes(messages)
        one, other = (
            self.encode([*messages, ChatMessage(role="user", content=text)]) for text in ("A", "(")
        )
        return one[: common_prefix_len(one, other)]

    def _shortened(
        self,
        messages: Sequence[ChatMessage],
        reply_len: int,
        retention_ratio: float,
        continues_last: bool,
    ) -> Prompt:
        num_system = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
        system, turns = list(messages[:num_system]), list(messages[num_system:])
        if turns and turns[0].tools:  # tools stand on the first message, and must outlive it
            system.append(ChatMessage(role="system", content="", tools=turns[0].tools))
            turns[0] = msgspec.structs.replace(turns[0], tools=())
        starts = [i for i, m in enumerate(turns) if m.role == "user"] or [0]
        starts[0] = 0
        limit = self._max_context - reply_len
        step = max(1, round(limit * (1 - retention_ratio)))
        first = self._first_in_reach(system, turns, step)
        starts = [start for start in starts if start >= first] or starts[-1:]
        start = starts[0]
        token_ids = self._encode_few([*system, *turns[start:]], continues_last)
        excess = len(token_ids) - limit
        if excess > 0:
            lengths = self._lengths(system, turns[start:], len(token_ids))
            first, excess = start, -(-excess // step) * step
        while excess > 0 and start != starts[-1]:
            # An estimate that was too low is not made again turn by turn: each is encoded whole.
            while excess > 0 and first < len(turns):
                excess -= lengths[first - starts[0]]
                first += 1
            start = next((s for s in starts if s >= max(first, start + 1)), starts[-1])
            first = start
            token_ids = self._encode_few([*system, *turns[start:]], continues_last)
            excess = len(token_ids) - limit
        self._check_length(len(token_ids), reply_len)
        return Prompt(token_ids, start)

    def _first_in_reach(
        self, system: list[ChatMessage], turns: list[ChatMessage], step: int
    ) -> int:
        """Of turns that are far too long, the first that there can be room for: what lies before
        it is not encoded. It moves in steps of ``step`` bytes, as what is left out does."""
        if self._num_bytes([*system, *turns]) <= self._max_context * _USUAL_BYTES_PER_TOKEN:
            return 0
        bytes_left = self._max_context * _MAX_BYTES_PER_TOKEN - self._num_bytes(system)
        tokens_left = self._most_tokens - self._num_tokens(system) if bytes_left >= 0 else -1
        first = len(turns)
        while first > 0:
            before = turns[first - 1 : first]
            bytes_left -= self._num_bytes(before)
            if min(bytes_left, tokens_left) < 0:
                break
            tokens_left -= self._num_tokens(before)
            first -= tokens_left >= 0
        num_bytes = self._num_bytes(turns[:first])
        missing = -num_bytes % step
        while first < len(turns) and missing > 0:
            missing -= self._num_bytes(turns[first : first + 1])
            first += 1
        return first

    def _lengths(
        self, system: list[ChatMessage], turns: list[ChatMessage], total_len: int
    ) -> list[int]:
        """Tokens of each of ``turns``, about: the prompt of all has ``total_len``."""
        lengths = [
            sum(len(self._tokenizer.encode(text)) for text in _texts(message))
            for message in (*system, *turns)
        ]
        # What the template puts around a message; the outcome is checked exactly.
        frame_len = max(0, total_len - sum(lengths)) // len(lengths)
        return [length + frame_len for length in lengths[len(system) :]]

    def _encode_few(self, messages: list[ChatMessage], continues_last: bool) -> list[int]:
        self._check_bytes(messages)
        return self.encode(messages, continues_last)

    def _has_few_bytes(self, messages: Sequence[ChatMessage]) -> bool:
        return self._num_bytes(messages) <= self._max_context * _MAX_BYTES_PER_TOKEN

    def _check_bytes(self, messages: Sequence[ChatMessage]) -> None:
        if not self._has_few_bytes(messages):
            raise PromptTooLongError(
                f"the messages have {self._num_bytes(messages)} bytes; that cannot fit into the "
                f"context of {self._max_context} tokens"
            )
        if self._num_bytes(messages) > self._max_context * _USUAL_BYTES_PER_TOKEN:
            self._check_slices(messages)

    def _check_slices(self, messages: Sequence[ChatMessage]) -> None:
        if self._num_tokens(messages) > self._most_tokens:
            raise PromptTooLongError(
                f"the messages have more than {self._most_tokens} tokens; that cannot fit into the "
                f"context of {self._max_context} tokens"
            )

    @property
    def _most_tokens(self) -> int:
        """More, in slices, are clearly too many."""
        return int(self._max_context * _CLEARLY)

    def _num_tokens(self, messages: Sequence[ChatMessage]) -> int:
        """Of all texts, encoded in slices: as many as there are, or some number that is clearly
        too large."""
        count = 0
        for text in (text for message in messages for text in _texts(message)):
            for start in range(0, len(text), _SLICE_CHARS):
                count += len(self._tokenizer.encode(text[start : start + _SLICE_CHARS]))
                if count > self._most_tokens:
                    return count
        return count

    def _check_length(self, prompt_len: int, reply_len: int) -> None:
        if prompt_len + reply_len > self._max_context:
            raise PromptTooLongError(
                f"the prompt has {prompt_len} tokens; the context of {self._max_context} tokens "
                f"must also hold {reply_len} of the reply"
            )

    @staticmethod
    def _num_bytes(messages: Sequence[ChatMessage]) -> int:
        texts = (text for message in messages for text in _texts(message))
        return sum(len(text.encode("utf-8", errors="replace")) for text in texts)


def _texts(message: ChatMessage) -> Iterator[str]:
    """All that a template may show of a message."""
    yield message.content
    for tool in message.tools:
        yield from (tool.name, tool.description, tool.parameters)
    for call in message.tool_calls:
        yield from (call.name, call.arguments)
