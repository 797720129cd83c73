"""Text of a model's own: it writes the user's turns too, and then answers them.

What a chat model says is nearer to what it will be asked to compute than any text at hand, and it
needs no data set. The chat template opens and closes the turns; the words are sampled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from llm_core.batch import ForwardBatch, Segment
from llm_core.chat import ChatTemplate, PromptPiece
from llm_core.errors import InvalidRequestError
from llm_core.messages import ChatMessage
from llm_core.model import ModelRunner
from llm_core.tokenizer import Tokenizer

NUM_STREAMS = 16  # conversations written at once
_TEMPERATURE = 0.9
_TOP_K = 200
_MARKS = ("First0mark", "Second0mark", "Third0mark")


@dataclass(frozen=True, slots=True)
class TurnGlue:
    """Token ids around turns: what opens the first user turn, what lies between a user's and an
    assistant's words, and between an assistant's and the next user's."""

    opening: list[int]
    to_assistant: list[int]
    to_user: list[int]


def turn_glue(
    tokenizer: Tokenizer, template: ChatTemplate, instructions: str | None = None
) -> TurnGlue:
    """``instructions`` are the system message, if there is to be one.

    Raises InvalidRequestError for a template that does not show what is said as it is."""
    roles = ("user", "assistant", "user")
    messages = [ChatMessage(role, mark) for role, mark in zip(roles, _MARKS, strict=True)]  # type: ignore[arg-type]
    if instructions is not None:
        messages.insert(0, ChatMessage("system", instructions))
    rest: list[PromptPiece] = template.render(messages)
    ids = []
    for index, mark in enumerate(_MARKS):
        before, rest = _split(rest, mark)
        ids.append(tokenizer.encode_pieces(before, is_start=index == 0))
    if not all(ids):
        raise InvalidRequestError("the chat template writes nothing between turns")
    return TurnGlue(*ids)


def _split(pieces: Sequence[PromptPiece], mark: str) -> tuple[list[PromptPiece], list[PromptPiece]]:
    for index, piece in enumerate(pieces):
        at = piece.text.find(mark)
        if at >= 0:
            before, after = piece.text[:at], piece.text[at + len(mark) :]
            head = [PromptPiece(before, is_control=False)] if before else []
            tail = [PromptPiece(after, is_control=False)] if after else []
            return [*pieces[:index], *head], [*tail, *pieces[index + 1 :]]
    raise InvalidRequestError(
        "the chat template does not show messages as they are, so the model cannot write its own: "
        "give a text instead"
    )


@dataclass(slots=True)
class _Conversation:
    """One stream: its tokens so far, and those that the template dictates next."""

    ids: list[int]
    is_user: bool = True
    dictated: deque[int] = field(default_factory=deque)

    def take(self, sampled: int, glue: TurnGlue, eos_ids: frozenset[int]) -> int:
        """The next token, given what the model would say."""
        if self.dictated:
            token = self.dictated.popleft()
        elif sampled in eos_ids:
            turn = glue.to_assistant if self.is_user else glue.to_user
            token, self.dictated, self.is_user = turn[0], deque(turn[1:]), not self.is_user
        else:
            token = sampled
        self.ids.append(token)
        return token


def write_conversations(
    runner: ModelRunner,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    num_conversations: int,
    length: int,
    seed: int,
    on_progress: Callable[[int, int], None],
) -> torch.Tensor:
    """int64 [num_conversations, length] token ids, the same for the same seed and model.

    The runner's pool must hold NUM_STREAMS sequences of ``length``. ``on_progress(done, total)``
    counts tokens. Raises InvalidRequestError as ``turn_glue``, and where ``length`` does not leave
    room for words.
    """
    glue = turn_glue(tokenizer, template)
    if length < len(glue.opening) + 2:
        raise InvalidRequestError(
            f"sequences of {length} tokens are too short: the opening of a conversation has "
            f"{len(glue.opening)}"
        )
    generator = torch.Generator().manual_seed(seed)
    total, done = num_conversations * length, 0
    written: list[list[int]] = []
    blocks_each = -(-length // runner.block_size)
    while len(written) < num_conversations:
        count = min(NUM_STREAMS, num_conversations - len(written))
        streams = [_Conversation(list(glue.opening)) for _ in range(count)]
        new_ids, start = [stream.ids[:] for stream in streams], 0
        while True:
            segments = tuple(
                Segment(tuple(range(i * blocks_each, (i + 1) * blocks_each)), start, len(ids))
                for i, ids in enumerate(new_ids)
            )
            num_new = len(new_ids[0])
            token_ids = torch.tensor([token for ids in new_ids for token in ids])
            last_rows = torch.arange(num_new - 1, count * num_new, num_new)
            done += count * num_new
            on_progress(min(done, total), total)
            start += num_new
            if start >= length:
                break
            sampled = _sample(
                runner.forward(ForwardBatch(token_ids, segments, last_rows)).logits, generator
            )
            new_ids = [
                [stream.take(token, glue, tokenizer.eos_ids)]
                for stream, token in zip(streams, sampled, strict=True)
            ]
        written += [stream.ids[:length] for stream in streams]
    return torch.tensor(written, dtype=torch.int64)


def _sample(logits: torch.Tensor, generator: torch.Generator) -> list[int]:
    best = logits.topk(min(_TOP_K, logits.shape[-1]))
    picked = torch.multinomial((best.values / _TEMPERATURE).softmax(-1), 1, generator=generator)
    ids: list[int] = best.indices.gather(1, picked).squeeze(1).tolist()
    return ids
