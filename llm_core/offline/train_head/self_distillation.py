"""Self-distillation data: conversations of which the target generates both sides.

Answers are sampled as when serving (same sampler, typical temperatures), so that a head is trained
on the distribution that it will draft. Conversations run in one continuous batch; the instructions
at their start are computed once and shared.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from llm_core.batch import ForwardBatch, Segment
from llm_core.chat import ChatTemplate
from llm_core.messages import SamplingParams
from llm_core.model import ModelRunner
from llm_core.offline.self_text import TurnSeparators, turn_separators
from llm_core.offline.train_head.topics import (
    CASED_OPENINGS,
    GENERAL_OPENINGS,
    OTHER_INSTRUCTIONS,
    PARLEY_INSTRUCTIONS,
    SPOKEN_OPENINGS,
    STORY_OPENINGS,
)
from llm_core.sampling import SamplerState, sample_row
from llm_core.tokenizer import Tokenizer

MAX_LEN = 448  # tokens of a conversation
_MAX_SHARED_LEN = 64  # tokens of instructions whose KV conversations share
_USER_LENGTHS = (8, 28)  # range of limits in tokens at which user turns are cut
_MIN_USER_LEN = 3
_ANSWER_LENGTHS = (40, 150)  # range of limits in tokens
_USER_PARAMS = SamplingParams(temperature=0.9, top_k=200)
_TEMPERATURES = ((0.0, 0.3), (0.2, 0.2), (0.7, 0.35), (1.0, 0.15))
_NUM_TURNS = ((1, 0.5), (2, 0.3), (3, 0.2))  # with probabilities, as _TEMPERATURES
_PARLEY_SHARE, _NO_INSTRUCTIONS_SHARE = 0.5, 0.25  # of conversations
_GIVEN_OPENINGS_WEIGHT = 1.0  # as much as all others together
_STORY_LENGTHS = (20, 80)
_MAX_FLOAT16 = torch.finfo(torch.float16).max
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _OpeningKind:
    """First words of user turns, their weight, and the range of limits in tokens of such turns."""

    openings: Sequence[str]
    weight: float
    user_lengths: tuple[int, int] = _USER_LENGTHS


_OPENING_KINDS = (
    _OpeningKind(SPOKEN_OPENINGS, 0.4),
    _OpeningKind(CASED_OPENINGS, 0.15),
    _OpeningKind(GENERAL_OPENINGS, 0.15),
    _OpeningKind(STORY_OPENINGS, 0.3, _STORY_LENGTHS),
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """``is_answer[i]``: token i is the assistant's (including its end of turn).

    ``features`` float16 [num tokens - 1, K * hidden_size]: of all tokens but the last; None if they
    were not captured.
    """

    token_ids: list[int]
    is_answer: list[bool]
    temperature: float
    features: torch.Tensor | None = None

    @property
    def num_answer_tokens(self) -> int:
        """Tokens of the assistant."""
        return sum(self.is_answer)


@dataclass(frozen=True, slots=True)
class _Prefix:
    """Instructions whose first ``length`` tokens fill blocks that conversations share."""

    separators: TurnSeparators
    block_ids: tuple[int, ...]
    length: int
    features: torch.Tensor | None


@dataclass(slots=True)
class _Stream:
    """A conversation in the making; tokens from ``start`` on are not computed yet."""

    prefix: _Prefix
    block_ids: tuple[int, ...]
    temperature: float
    seed: int
    turns_left: int
    rng: random.Random
    ids: list[int]
    is_answer: list[bool]
    start: int
    turn_limit: int
    is_user: bool = True
    turn_len: int = 0
    features: list[torch.Tensor] = field(default_factory=list)

    def sampler(self) -> SamplerState:
        temperature = self.temperature
        params = _USER_PARAMS if self.is_user else SamplingParams(temperature=temperature)
        state = SamplerState(params, (), vocab_size=0)
        state.seed = self.seed
        return state


class SelfDistillation:
    """An endless generator of conversations. Uses the runner's KV blocks from 0 on."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        num_streams: int,
        seed: int,
        openings: Sequence[str] = (),
    ) -> None:
        """``openings``: further first words of user turns. Raises InvalidRequestError as
        ``turn_separators``."""
        self._runner = runner
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        given = (_OpeningKind(openings, _GIVEN_OPENINGS_WEIGHT),) if openings else ()
        kinds = (*_OPENING_KINDS, *given)
        self._kinds = tuple((kind, kind.weight) for kind in kinds)
        self._eos = tokenizer.eos_ids
        self._line_ends = frozenset(
            i for i, text in enumerate(tokenizer.token_bytes) if b"\n" in text
        )
        self._max_len = min(MAX_LEN, runner.max_context)
        self._next_block = 0
        self._prefixes = {
            text: self._make_prefix(turn_separators(tokenizer, template, text))
            for text in (None, PARLEY_INSTRUCTIONS, *OTHER_INSTRUCTIONS)
        }
        blocks_each = -(-self._max_len // runner.block_size)
        self._free = [self._allocate_blocks(blocks_each) for _ in range(num_streams)]

    @staticmethod
    def num_blocks(num_streams: int, block_size: int) -> int:
        """The number of KV blocks that the runner must have."""
        per_stream = -(-MAX_LEN // block_size)
        return num_streams * per_stream + (2 + len(OTHER_INSTRUCTIONS)) * (
            _MAX_SHARED_LEN // block_size
        )

    def conversations(self) -> Iterator[Conversation]:
        """Conversations in the order in which they end."""
        streams: list[_Stream] = []
        while True:
            while self._free:
                streams.append(self._start_stream(self._free.pop()))
            logits = self._step(streams)
            going = []
            for stream, row in zip(streams, logits, strict=True):
                if self._advance(stream, row):
                    going.append(stream)
                else:
                    self._free.append(stream.block_ids[len(stream.prefix.block_ids) :])
                    if any(stream.is_answer):
                        yield self._finished(stream)
            streams = going

    def _allocate_blocks(self, count: int) -> tuple[int, ...]:
        first, self._next_block = self._next_block, self._next_block + count
        assert self._next_block <= self._runner.num_blocks, "the pool is smaller than num_blocks()"
        return tuple(range(first, self._next_block))

    def _make_prefix(self, separators: TurnSeparators) -> _Prefix:
        """Computes the full blocks of an opening; its rest is computed in each conversation."""
        size = self._runner.block_size
        length = min(_MAX_SHARED_LEN, len(separators.opening) - 1) // size * size
        if length == 0:
            return _Prefix(separators, (), 0, None)
        block_ids = self._allocate_blocks(length // size)
        batch = ForwardBatch(
            torch.tensor(separators.opening[:length]),
            (Segment(block_ids, 0, length),),
            torch.tensor([length - 1]),
            wants_features=True,
        )
        features = self._runner.forward(batch).features
        return _Prefix(separators, block_ids, length, stored_features(features))

    def _start_stream(self, own_blocks: tuple[int, ...]) -> _Stream:
        rng = random.Random(self._rng.getrandbits(64))
        at = rng.random()
        if at < _PARLEY_SHARE:
            prefix = self._prefixes[PARLEY_INSTRUCTIONS]
        elif at < 1 - _NO_INSTRUCTIONS_SHARE:
            prefix = self._prefixes[rng.choice(OTHER_INSTRUCTIONS)]
        else:
            prefix = self._prefixes[None]
        opening, turn_limit = self._opening(rng)
        ids = [*prefix.separators.opening, *opening]
        features = [] if prefix.features is None else [prefix.features]
        return _Stream(
            prefix=prefix,
            block_ids=prefix.block_ids + own_blocks,
            temperature=_pick(rng, _TEMPERATURES),
            seed=rng.getrandbits(64),
            turns_left=_pick(rng, _NUM_TURNS),
            rng=rng,
            ids=ids,
            is_answer=[False] * len(ids),
            start=prefix.length,
            turn_limit=turn_limit,
            features=features,
        )

    def _opening(self, rng: random.Random) -> tuple[list[int], int]:
        """The first tokens of a user turn, and its maximum length in tokens."""
        kind = _pick(rng, self._kinds)
        first_ids = self._tokenizer.encode(rng.choice(kind.openings))
        return first_ids, rng.randint(*kind.user_lengths)

    def _step(self, streams: list[_Stream]) -> torch.Tensor:
        """Computes the new tokens of all streams; logits [len(streams), vocab_size] after the last
        of each."""
        token_ids: list[int] = []
        segments, last_rows = [], []
        for stream in streams:
            new_ids = stream.ids[stream.start :]
            num_blocks = -(-len(stream.ids) // self._runner.block_size)
            segments.append(Segment(stream.block_ids[:num_blocks], stream.start, len(new_ids)))
            token_ids += new_ids
            last_rows.append(len(token_ids) - 1)
        batch = ForwardBatch(
            torch.tensor(token_ids), tuple(segments), torch.tensor(last_rows), wants_features=True
        )
        result = self._runner.forward(batch)
        features = stored_features(result.features)
        if features is not None:
            lengths = [segment.length for segment in segments]
            for stream, rows in zip(streams, torch.split(features, lengths), strict=True):
                stream.features.append(rows)
        for stream in streams:
            stream.start = len(stream.ids)
        return result.logits

    def _advance(self, stream: _Stream, logits: torch.Tensor) -> bool:
        """Samples the next token and adds the template's tokens after it. False: the conversation
        is over."""
        banned = self._eos if stream.is_user and stream.turn_len < _MIN_USER_LEN else ()
        token = sample_row(logits.numpy(), stream.sampler(), len(stream.ids), banned=banned)
        stream.turn_len += 1
        is_end = token in self._eos
        separators = stream.prefix.separators
        if stream.is_user:
            is_line_end = token in self._line_ends and stream.turn_len > 1
            if is_end or is_line_end or stream.turn_len >= stream.turn_limit:
                self._extend(stream, separators.to_assistant)
                stream.is_user, stream.turn_len = False, 0
                stream.turn_limit = stream.rng.randint(*_ANSWER_LENGTHS)
            else:
                self._extend(stream, [token])
            return self._has_room(stream)
        self._extend(stream, [token], is_answer=True)
        if not is_end:
            return stream.turn_len < stream.turn_limit and self._has_room(stream)
        stream.turns_left -= 1
        if stream.turns_left == 0:
            return False
        # The end-of-turn token was sampled: it is the first of the separator.
        opening, stream.turn_limit = self._opening(stream.rng)
        self._extend(stream, [*separators.to_user[1:], *opening])
        stream.is_user, stream.turn_len = True, 0
        return self._has_room(stream)

    def _extend(self, stream: _Stream, ids: list[int], *, is_answer: bool = False) -> None:
        stream.ids += ids
        stream.is_answer += [is_answer] * len(ids)

    def _has_room(self, stream: _Stream) -> bool:
        return len(stream.ids) + 8 <= self._max_len

    def _finished(self, stream: _Stream) -> Conversation:
        length = 1 + max(i for i, is_answer in enumerate(stream.is_answer) if is_answer)
        features = torch.cat(stream.features)[: length - 1] if stream.features else None
        return Conversation(
            stream.ids[:length], stream.is_answer[:length], stream.temperature, features
        )


def stored_features(features: torch.Tensor | None) -> torch.Tensor | None:
    """As float16, clamped: hidden states of some models' first tokens exceed its range."""
    if features is None:
        return None
    return features.clamp(-_MAX_FLOAT16, _MAX_FLOAT16).half()


def _pick(rng: random.Random, choices: Sequence[tuple[_T, float]]) -> _T:
    return rng.choices([value for value, _ in choices], [weight for _, weight in choices])[0]
