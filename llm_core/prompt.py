"""Messages to prompt tokens that fit, or a clear error. Long conversations lose their oldest turns.

What is left out depends on the conversation's length in coarse steps, so that a growing one keeps
the same beginning for many turns and its cached prefix stays of use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from llm_core.chat_template import ChatTemplate
from llm_core.errors import InvalidRequestError, PromptTooLongError
from llm_core.messages import ChatMessage, Overflow
from llm_core.sequence import common_prefix_len
from llm_core.tokenizer import Tokenizer

# A token of a BPE vocabulary is rarely longer; a text above this many bytes a token of context is
# refused before time is spent on encoding it.
_MAX_BYTES_PER_TOKEN = 64
_FRAME_LEN = 5  # tokens that a template puts around a message; the outcome is checked exactly
_DROP_STEP = 4  # turns are left out in steps of a quarter of what fits


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
    ) -> Prompt:
        """A prompt that leaves room for ``reply_len`` tokens.

        Raises InvalidRequestError, and PromptTooLongError: when refused, or when the system prompt
        and the last turn alone are too long.
        """
        if overflow == "drop_oldest" and messages:
            return self._shortened(messages, reply_len)
        self._check_bytes(messages)
        token_ids = self.encode(messages)
        self._check_length(len(token_ids), reply_len)
        return Prompt(token_ids)

    def encode(self, messages: Sequence[ChatMessage]) -> list[int]:
        """All tokens, with the header of the reply. Raises InvalidRequestError."""
        token_ids = self._tokenizer.encode_pieces(self._template.render(messages))
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

    def _shortened(self, messages: Sequence[ChatMessage], reply_len: int) -> Prompt:
        num_system = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
        system, turns = list(messages[:num_system]), list(messages[num_system:])
        if turns and turns[0].tools:  # tools stand on the first message, and must outlive it
            system.append(ChatMessage(role="system", content="", tools=turns[0].tools))
            turns[0] = msgspec.structs.replace(turns[0], tools=())
        starts = [i for i, m in enumerate(turns) if m.role == "user"] or [0]
        limit = self._max_context - reply_len
        first = self._first_kept(system, turns, limit) if len(starts) > 1 else 0
        for start in [s for s in (0, *starts) if s >= first] or starts[-1:]:
            kept = [*system, *turns[start:]]
            if self._num_bytes(kept) > self._max_context * _MAX_BYTES_PER_TOKEN:
                continue
            token_ids = self.encode(kept)
            if len(token_ids) <= limit:
                return Prompt(token_ids, start)
        last = [*system, *turns[starts[-1] :]]
        self._check_bytes(last)
        self._check_length(len(self.encode(last)), reply_len)
        raise AssertionError("the last turn fits, and was tried")

    def _first_kept(self, system: list[ChatMessage], turns: list[ChatMessage], limit: int) -> int:
        """The first turn message to keep: what goes is a multiple of a step, at the least."""
        lengths = [self._length_of(message) for message in turns]
        total = sum(lengths) + sum(self._length_of(message) for message in system)
        step = max(1, limit // _DROP_STEP)
        excess = -(-max(0, total - limit) // step) * step
        index = 0
        while excess > 0 and index < len(turns):
            excess -= lengths[index]
            index += 1
        return index

    def _length_of(self, message: ChatMessage) -> int:
        return len(self._tokenizer.encode(message.content)) + _FRAME_LEN

    def _check_bytes(self, messages: Sequence[ChatMessage]) -> None:
        num_bytes = self._num_bytes(messages)
        if num_bytes > self._max_context * _MAX_BYTES_PER_TOKEN:
            raise PromptTooLongError(
                f"the messages have {num_bytes} bytes; that cannot fit into the context of "
                f"{self._max_context} tokens"
            )

    def _check_length(self, prompt_len: int, reply_len: int) -> None:
        if prompt_len + reply_len > self._max_context:
            raise PromptTooLongError(
                f"the prompt has {prompt_len} tokens; the context of {self._max_context} tokens "
                f"must also hold {reply_len} of the reply"
            )

    @staticmethod
    def _num_bytes(messages: Sequence[ChatMessage]) -> int:
        return sum(len(m.content.encode("utf-8", errors="replace")) for m in messages)
