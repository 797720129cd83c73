"""Conversations to train on, written by the target: the user's turns too, and then the answers.

Answers are sampled as the engine samples them when it serves (same sampler, temperatures of real
use), so that a head learns what it will be asked to draft. Streams come and go in one batch; what
they share (the instructions at the start) is computed once.
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
from llm_core.offline.self_text import TurnGlue, turn_glue
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
_MOST_SHARED = 64  # tokens of instructions that are computed once for all
_USER_LENGTHS = (8, 28)  # longer turns are cut, as a caller is by noise
_MIN_USER_LEN = 3
_ANSWER_LENGTHS = (40, 150)
_USER_PARAMS = SamplingParams(temperature=0.9, top_k=200)
_TEMPERATURES = ((0.0, 0.3), (0.2, 0.2), (0.7, 0.35), (1.0, 0.15))
_NUM_TURNS = ((1, 0.5), (2, 0.3), (3, 0.2))
_SHARE_OF_PARLEY, _SHARE_WITHOUT = 0.5, 0.25
_LARGEST = torch.finfo(torch.float16).max
_T = TypeVar("_T")
_SHARE_OF_GIVEN = 1.0  # as much as all others together
_STORY_LENGTHS = (20, 80)


@dataclass(frozen=True, slots=True)
class _OpeningKind:
    """First words of what users say, and the lengths in tokens at which such a turn is cut."""

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
    """``is_answer[i]``: token i was said by the assistant (the end of its turn included).

    ``features`` float16 [num tokens - 1, K * hidden_size] are those of all tokens but the last;
    None when the runner was not asked for any.
    """

    token_ids: list[int]
    is_answer: list[bool]
    temperature: float
    features: torch.Tensor | None = None

    @property
    def num_answer_tokens(self) -> int:
        """What there is to learn from."""
        return sum(self.is_answer)


@dataclass(frozen=True, slots=True)
class _Prefix:
    """Instructions whose first ``length`` tokens are kept in whole blocks that streams share."""

    glue: TurnGlue
    block_ids: tuple[int, ...]
    length: int
    features: torch.Tensor | None


@dataclass(slots=True)
class _Stream:
    """A conversation that is being written: ``new_ids`` wait to be computed from ``start`` on."""

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
    """Writes conversations without end. The runner's pool is used from block 0 on."""

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
        """``openings``: more first words of what users say. Raises InvalidRequestError as
        ``turn_glue``."""
        self._runner = runner
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        given = (_OpeningKind(openings, _SHARE_OF_GIVEN),) if openings else ()
        kinds = (*_OPENING_KINDS, *given)
        self._kinds = tuple((kind, kind.weight) for kind in kinds)
        self._eos = tokenizer.eos_ids
        self._line_ends = frozenset(
            i for i, text in enumerate(tokenizer.token_bytes) if b"\n" in text
        )
        self._max_len = min(MAX_LEN, runner.max_context)
        self._next_block = 0
        self._prefixes = {
            text: self._share(turn_glue(tokenizer, template, text))
            for text in (None, PARLEY_INSTRUCTIONS, *OTHER_INSTRUCTIONS)
        }
        blocks_each = -(-self._max_len // runner.block_size)
        self._free = [self._take_blocks(blocks_each) for _ in range(num_streams)]

    @staticmethod
    def num_blocks(num_streams: int, block_size: int) -> int:
        """What the runner's pool must hold."""
        per_stream = -(-MAX_LEN // block_size)
        return num_streams * per_stream + (2 + len(OTHER_INSTRUCTIONS)) * (
            _MOST_SHARED // block_size
        )

    def conversations(self) -> Iterator[Conversation]:
        """Finished ones as they come."""
        streams: list[_Stream] = []
        while True:
            while self._free:
                streams.append(self._open(self._free.pop()))
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

    def _take_blocks(self, count: int) -> tuple[int, ...]:
        first, self._next_block = self._next_block, self._next_block + count
        assert self._next_block <= self._runner.num_blocks, "the pool is smaller than num_blocks()"
        return tuple(range(first, self._next_block))

    def _share(self, glue: TurnGlue) -> _Prefix:
        """Computes the whole blocks of an opening; the rest of it is each stream's own."""
        size = self._runner.block_size
        length = min(_MOST_SHARED, len(glue.opening) - 1) // size * size
        if length == 0:
            return _Prefix(glue, (), 0, None)
        block_ids = self._take_blocks(length // size)
        batch = ForwardBatch(
            torch.tensor(glue.opening[:length]),
            (Segment(block_ids, 0, length),),
            torch.tensor([length - 1]),
            wants_features=True,
        )
        features = self._runner.forward(batch).features
        return _Prefix(glue, block_ids, length, stored_features(features))

    def _open(self, own_blocks: tuple[int, ...]) -> _Stream:
        rng = random.Random(self._rng.getrandbits(64))
        at = rng.random()
        if at < _SHARE_OF_PARLEY:
            prefix = self._prefixes[PARLEY_INSTRUCTIONS]
        elif at < 1 - _SHARE_WITHOUT:
            prefix = self._prefixes[rng.choice(OTHER_INSTRUCTIONS)]
        else:
            prefix = self._prefixes[None]
        opening, turn_limit = self._opening(rng)
        ids = [*prefix.glue.opening, *opening]
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
        """The first words of a user's turn, and how many tokens it may have."""
        kind = _pick(rng, self._kinds)
        words = self._tokenizer.encode(rng.choice(kind.openings))
        return words, rng.randint(*kind.user_lengths)

    def _step(self, streams: list[_Stream]) -> torch.Tensor:
        """Computes what waits; logits [len(streams), vocab_size] after each stream's last token."""
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
        """Adds the next token, and what the template dictates after it. False: it is finished."""
        banned = self._eos if stream.is_user and stream.turn_len < _MIN_USER_LEN else ()
        token = sample_row(logits.numpy(), stream.sampler(), len(stream.ids), banned=banned)
        stream.turn_len += 1
        is_end = token in self._eos
        glue = stream.prefix.glue
        if stream.is_user:
            is_line_end = token in self._line_ends and stream.turn_len > 1
            if is_end or is_line_end or stream.turn_len >= stream.turn_limit:
                self._extend(stream, glue.to_assistant)
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
        # The end of the turn has been said: the first token of the glue is there already.
        opening, stream.turn_limit = self._opening(stream.rng)
        self._extend(stream, [*glue.to_user[1:], *opening])
        stream.is_user, stream.turn_len = True, 0
        return self._has_room(stream)

    def _extend(self, stream: _Stream, ids: list[int], *, is_answer: bool = False) -> None:
        stream.ids += ids
        stream.is_answer += [is_answer] * len(ids)

    def _has_room(self, stream: _Stream) -> bool:
        return len(stream.ids) + 8 <= self._max_len

    def _finished(self, stream: _Stream) -> Conversation:
        length = 1 + max(i for i, said in enumerate(stream.is_answer) if said)
        features = torch.cat(stream.features)[: length - 1] if stream.features else None
        return Conversation(
            stream.ids[:length], stream.is_answer[:length], stream.temperature, features
        )


def stored_features(features: torch.Tensor | None) -> torch.Tensor | None:
    """float16: hidden states of some models' first tokens exceed its range and are clamped."""
    if features is None:
        return None
    return features.clamp(-_LARGEST, _LARGEST).half()


def _pick(rng: random.Random, choices: Sequence[tuple[_T, float]]) -> _T:
    return rng.choices([value for value, _ in choices], [weight for _, weight in choices])[0]
