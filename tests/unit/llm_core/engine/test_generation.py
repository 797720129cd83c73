"""One reply by hand: log-probabilities with their text, the least length, guides, the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_core.engine.generation import Generation
from llm_core.errors import InvalidRequestError
from llm_core.messages import (
    ChoiceGuide,
    FirstToken,
    GenerationDone,
    GenerationEvent,
    SamplingParams,
    TextDelta,
    TokenLogprob,
)
from llm_core.sampling.logprobs import token_logprob
from llm_core.sampling.sampler import ChunkRow, FloatRow
from llm_core.scheduling.draft_tree import EMPTY, DraftTree
from llm_core.scheduling.sequence import TokenSequence
from llm_core.structured.constraint import GuideCompiler
from tests.support.tiny_model import TOKENS, tiny_tokenizer

EOS = 2
FIRST_BYTE = 3


def start(**kwargs: Any) -> Generation:
    params = SamplingParams(**kwargs)
    guide = None
    if params.guide is not None:
        guide = GuideCompiler(tiny_tokenizer(), "hermes").start(params.guide)
    sequence = TokenSequence(1, [FIRST_BYTE], max_len=1 + params.max_tokens)
    sequence.computed_len = 1
    return Generation(sequence, params, tiny_tokenizer(), received_ns=0, guide=guide)


def row_for(token_id: int, seed: int = 0) -> FloatRow:
    """Logits that prefer ``token_id``."""
    row = np.random.default_rng(seed).standard_normal(len(TOKENS)).astype(np.float32)
    row[token_id] = 9.0
    return row


def say(generation: Generation, *token_ids: int) -> list[GenerationEvent]:
    """Feed rows that prefer these tokens, until the reply ends."""
    events: list[GenerationEvent] = []
    for number, token_id in enumerate(token_ids):
        events += generation.advance(ChunkRow(row_for(token_id, number)))
        if generation.is_finished:
            break
        generation._sequence.computed_len += 1
    return events


def test_a_guide_that_fails_while_drafts_are_proposed_ends_the_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = DraftTree.chain([FIRST_BYTE], [0.5])
    for ask, answer in (
        (Generation.forced_tokens, []),
        (lambda generation: generation.allowed_drafts(tree), EMPTY),
    ):
        generation = start(guide=ChoiceGuide(options=("ab",)), max_tokens=5)

        def fails(*args: object) -> None:
            raise InvalidRequestError("choice: it takes too much time to follow")

        monkeypatch.setattr(generation._guide, "forced", fails)
        monkeypatch.setattr(generation._guide, "num_allowed", fails)
        assert ask(generation) == answer
        rows, events = generation.advance_along(EMPTY, [ChunkRow(row_for(FIRST_BYTE))])
        assert rows == [0] and [type(event) for event in events] == [InvalidRequestError]


def byte_ids(text: str) -> list[int]:
    return [FIRST_BYTE + byte for byte in text.encode()]


def text_and_logprobs(events: list[GenerationEvent]) -> tuple[str, list[TokenLogprob]]:
    deltas = [event for event in events if isinstance(event, TextDelta)]
    return "".join(d.text for d in deltas), [entry for d in deltas for entry in d.logprobs]


def test_events_of_a_reply() -> None:
    first, *deltas, done = say(start(max_tokens=9), *byte_ids("ab"), EOS)
    assert isinstance(first, FirstToken)
    assert deltas == [TextDelta(text="a", num_tokens=1), TextDelta(text="b", num_tokens=2)]
    assert isinstance(done, GenerationDone)
    assert (done.finish_reason, done.usage.completion_tokens) == ("stop", 3)


def test_choosing_changes_nothing() -> None:
    generation = start(temperature=1.0, seed=3, guide=ChoiceGuide(options=("abc", "abd")))
    rows = [row_for(70, seed) for seed in range(5)]
    assert [generation.choose(row) for row in rows] == [generation.choose(row) for row in rows]


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    row = row_for(70)
    exact = row.astype(np.float64) - np.log(np.exp(row.astype(np.float64)).sum())
    generation = start(
        temperature=5.0, seed=1, top_p=0.5, presence_penalty=1.0, logprobs=3, logit_bias={71: 90.0}
    )
    _, (entry,) = text_and_logprobs(generation.advance(ChunkRow(row)))
    assert entry.token == tiny_tokenizer().token_bytes[71]
    assert entry.logprob == pytest.approx(exact[71], abs=1e-5)
    order = np.argsort(-exact)[:3]
    assert [t.token for t in entry.top] == [tiny_tokenizer().token_bytes[i] for i in order]
    assert [t.logprob for t in entry.top] == pytest.approx(exact[order], abs=1e-5)


def test_alternatives_of_equal_logits_are_the_smaller_ids() -> None:
    names = [bytes((value,)) for value in range(9)]
    entry = token_logprob(np.zeros(9, dtype=np.float32), 4, 3, names)
    assert [t.token for t in entry.top] == names[:3]
    assert entry.logprob == pytest.approx(-np.log(9))
    assert len(token_logprob(np.zeros(2, dtype=np.float32), 0, 20, names).top) == 2


def test_no_logprobs_unless_asked_for() -> None:
    assert text_and_logprobs(say(start(), *byte_ids("ab"), EOS))[1] == []
    _, entries = text_and_logprobs(say(start(logprobs=0), *byte_ids("ab"), EOS))
    assert [(e.token, e.top) for e in entries] == [(b"a", ()), (b"b", ())]


@pytest.mark.parametrize(
    ("said", "stop", "shown"),
    [
        ("One STOP two", ("STOP",), "One "),
        ("aéSTOP", ("STOP",), "aé"),
        ("ST ST", ("STOP",), "ST ST"),
        ("x##", ("###",), "x##"),
        ("é🙂", (), "é🙂"),
    ],
)
def test_logprobs_under_hold_back_are_of_the_text_that_is_shown(
    said: str, stop: tuple[str, ...], shown: str
) -> None:
    events = say(start(max_tokens=50, logprobs=1, stop=stop), *byte_ids(said), EOS)
    text, entries = text_and_logprobs(events)
    assert text == shown
    assert b"".join(entry.token for entry in entries) == shown.encode()
    for event in events:
        if isinstance(event, TextDelta):
            assert b"".join(e.token for e in event.logprobs) == event.text.encode()


@given(
    said=st.text(alphabet="ab#é🙂", max_size=12),
    stop=st.lists(st.text(alphabet="ab#é", min_size=1, max_size=4), max_size=2),
    max_tokens=st.integers(1, 40),
)
@settings(max_examples=150, deadline=None)
def test_logprobs_always_add_up_to_the_text(said: str, stop: list[str], max_tokens: int) -> None:
    params: dict[str, Any] = {"max_tokens": max_tokens, "stop": tuple(stop)}
    events = say(start(logprobs=0, **params), *byte_ids(said), EOS)
    text, entries = text_and_logprobs(events)
    assert text == text_and_logprobs(say(start(**params), *byte_ids(said), EOS))[0]
    assert b"".join(entry.token for entry in entries) == text.encode()


def test_min_tokens_masks_exactly_that_many_ends() -> None:
    for min_tokens in (0, 1, 2, 5):
        events = say(start(max_tokens=9, min_tokens=min_tokens), *[EOS] * 9)
        done = events[-1]
        assert isinstance(done, GenerationDone)
        assert (done.finish_reason, done.usage.completion_tokens) == ("stop", min_tokens + 1)


def test_min_tokens_holds_for_stop_strings() -> None:
    ids = byte_ids("a.b.c.d")
    text, _ = text_and_logprobs(say(start(min_tokens=3, stop=(".",)), *ids))
    assert text == "a.b"
    text, _ = text_and_logprobs(say(start(min_tokens=4, stop=(".",)), *ids))
    assert text == "a.b.c"


def test_a_guide_ends_the_reply_without_an_end_token() -> None:
    events = say(start(guide=ChoiceGuide(options=("yes", "no"))), *byte_ids("nab!"))
    done = events[-1]
    assert text_and_logprobs(events)[0] == "no"
    assert isinstance(done, GenerationDone)
    assert (done.finish_reason, done.usage.completion_tokens) == ("stop", 2)


def test_a_guide_allows_the_end_only_where_it_may_be() -> None:
    guide = ChoiceGuide(options=("yes", "yes sir"))
    assert text_and_logprobs(say(start(guide=guide), *[EOS] * 9))[0] == "yes"
    assert text_and_logprobs(say(start(guide=guide), *byte_ids("yes s!!")))[0] == "yes sir"


def test_a_guide_cut_short_says_length() -> None:
    events = say(start(max_tokens=2, guide=ChoiceGuide(options=("yes",))), *byte_ids("yes"))
    assert isinstance(events[-1], GenerationDone)
    assert events[-1].finish_reason == "length"
