"""Speculation in the engine: the same output in fewer steps, and no leaked state.

The runner is a fake whose KV are tokens, so that missing, stale or rejected rows are detected; the
drafter proposes random trees that are often right.
"""

from __future__ import annotations

from typing import Any

import pytest

from llm_core.engine.engine import Engine
from llm_core.errors import LlmError
from llm_core.messages import (
    ChoiceGuide,
    FirstToken,
    GenerationDone,
    JsonGuide,
    RegexGuide,
    SamplingParams,
    TextDelta,
)
from llm_core.speculative.control.base import FixedController
from llm_core.speculative.drafters.base import DraftShape
from llm_core.speculative.drafters.ngram import NgramDrafter
from tests.support.fake_drafter import GuessingDrafter
from tests.support.tiny_model import TOKENS
from tests.unit.llm_core.engine.test_engine import (
    EOS,
    FakeRunner,
    assert_nothing_left,
    drain,
    make_engine,
    reply_to,
    saying,
    submit,
    user,
)

TREE = DraftShape(max_drafts=9, max_depth=5, width=3)
CHAIN = DraftShape(max_drafts=4, max_depth=4)


def best_of(runner: FakeRunner) -> Any:
    return lambda tokens: int(runner._logits(tokens).argmax())


def speculating(
    runner: FakeRunner | None = None,
    *,
    shape: DraftShape = TREE,
    accuracy: float = 0.7,
    seed: int = 0,
    **kwargs: Any,
) -> tuple[Engine, GuessingDrafter]:
    runner = runner or FakeRunner()
    engine = make_engine(runner, **kwargs)
    drafter = GuessingDrafter(best_of(runner), len(TOKENS), seed=seed, accuracy=accuracy)
    engine.speculate(drafter, FixedController(shape))
    return engine, drafter


@pytest.mark.parametrize("shape", [TREE, CHAIN], ids=["tree", "chain"])
def test_same_text_in_fewer_steps(shape: DraftShape) -> None:
    plain, plain_done = reply_to(make_engine(), "Hi", max_tokens=60, ignore_eos=True)
    engine, _ = speculating(shape=shape)
    text, done = reply_to(engine, "Hi", max_tokens=60, ignore_eos=True)
    assert text == plain and done.usage == plain_done.usage
    assert done.num_steps < 40 < plain_done.num_steps == 60
    assert_nothing_left(engine)
    counts = done.speculation
    # Each step gives a token of the target's own; the first one was the prompt's.
    assert counts.num_accepted == 60 - done.num_steps
    assert sum(counts.accepted_by_depth) == counts.num_accepted <= counts.num_drafted
    assert counts.num_steps < done.num_steps
    assert list(counts.accepted_by_depth) == sorted(counts.accepted_by_depth, reverse=True)
    assert engine.stats().speculation.num_accepted == counts.num_accepted


def test_drafter_that_is_always_right_or_always_wrong() -> None:
    plain, _ = reply_to(make_engine(), "Hi", max_tokens=30, ignore_eos=True)
    engine, drafter = speculating(shape=CHAIN, accuracy=1.0)
    text, done = reply_to(engine, "Hi", max_tokens=30, ignore_eos=True)
    assert text == plain
    assert done.speculation.num_accepted == done.speculation.num_drafted
    assert done.speculation.num_drafted == sum(map(len, drafter.proposed))
    runner = FakeRunner()
    engine = make_engine(runner)
    wrong = GuessingDrafter(lambda t: (best_of(runner)(t) + 1) % 200, len(TOKENS), accuracy=1.0)
    engine.speculate(wrong, FixedController(TREE))
    text, done = reply_to(engine, "Hi", max_tokens=30, ignore_eos=True)
    assert text == plain
    assert (done.speculation.num_accepted, done.num_steps) == (0, 30)
    assert done.speculation.num_drafted > 50


@pytest.mark.parametrize("seed", range(4))
def test_reply_ends_within_an_accepted_path(seed: int) -> None:
    """By EOS, a stop string or max_tokens, at any position of a chain."""
    options = {"seed": seed, "shape": DraftShape(8, 8), "accuracy": 1.0}
    runner = saying("One. STOP two", "Hi", EOS, 77, 78)
    for params in (
        {},
        {"stop": ("STOP",)},
        {"max_tokens": 6},
        {"max_tokens": 1},
        {"min_tokens": 20},
    ):
        plain, plain_done = reply_to(make_engine(runner), "Hi", **params)
        engine, _ = speculating(runner, **options)
        text, done = reply_to(engine, "Hi", **params)
        assert text == plain
        assert (done.usage, done.finish_reason) == (plain_done.usage, plain_done.finish_reason)
        assert_nothing_left(engine)


def test_each_token_has_its_own_event() -> None:
    engine, _ = speculating(saying("abcdefghijkl", "Hi", EOS), shape=CHAIN, accuracy=1.0)
    submit(engine, 1, "Hi")
    events = [event for _, event in drain(engine)]
    assert isinstance(events[0], FirstToken)
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert [(d.text, d.num_tokens) for d in deltas] == [
        (c, i) for i, c in enumerate("abcdefghijkl", 1)
    ]


def test_drafts_respect_max_tokens_and_context() -> None:
    runner = FakeRunner(max_context=60)
    engine, drafter = speculating(runner, shape=DraftShape(30, 12, 3))
    _, done = reply_to(engine, "Hi", max_tokens=1000, ignore_eos=True)
    assert done.finish_reason == "length"
    assert_nothing_left(engine)
    engine, drafter = speculating(shape=DraftShape(30, 12, 3))
    reply_to(engine, "Hi", max_tokens=4, ignore_eos=True)
    # After the prompt's token three are wanted, and the last is the target's.
    assert max((max(t.depths, default=0) for t in drafter.proposed), default=0) <= 2


def all_texts(engine: Engine, count: int) -> dict[int, list[Any]]:
    for i in range(count):
        params = {"ignore_eos": True, "max_tokens": 30 + 5 * i, "logprobs": 2 if i % 2 else None}
        params |= [
            {},
            {"temperature": 0.8, "seed": i},
            {"temperature": 1.0, "seed": i, "repetition_penalty": 1.3},
            {"frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": {70: 3.0}},
        ][i % 4]
        submit(engine, i, "tell me" + "!" * i, **params)
    found: dict[int, list[Any]] = {}
    for number, event in drain(engine):
        if isinstance(event, FirstToken):
            continue
        if isinstance(event, GenerationDone):
            event = (event.usage.completion_tokens, event.finish_reason)
        elif isinstance(event, TextDelta):
            event = (event.text, event.num_tokens, event.logprobs)
        found.setdefault(number, []).append(event)
    assert_nothing_left(engine)
    return found


@pytest.mark.parametrize("num_blocks", [100, 12])
def test_many_requests_with_and_without_preemption(num_blocks: int) -> None:
    """With 12 blocks some requests are preempted while they verify drafts."""
    options: dict[str, Any] = {"max_sequences": 4}
    plain = all_texts(make_engine(FakeRunner(num_blocks=100), **options), 6)
    engine, _ = speculating(FakeRunner(num_blocks=num_blocks), **options)
    assert all_texts(engine, 6) == plain
    stats = engine.stats()
    assert (stats.total_preempted > 0) == (num_blocks == 12)
    assert stats.speculation.num_accepted > 20


def test_prefix_cache_holds_no_drafts() -> None:
    """The fake runner checks the cached prefixes that later requests use."""
    engine, _ = speculating(FakeRunner(num_blocks=100, block_size=4))
    replies = {}
    for round_ in range(3):
        for i in range(4):
            reply = reply_to(engine, "Hello " * (i + 1), max_tokens=21, ignore_eos=True)
            assert replies.setdefault(i, reply[0]) == reply[0]
            if round_:
                assert reply[1].usage.cached_tokens > 0
    assert_nothing_left(engine)


def test_abort_after_each_step() -> None:
    for num_steps in range(12):
        engine, drafter = speculating()
        plain, _ = reply_to(make_engine(), "Hello", max_tokens=30, ignore_eos=True)
        submit(engine, 1, "Hi", max_tokens=40, ignore_eos=True)
        submit(engine, 2, "Hello", max_tokens=30, ignore_eos=True)
        text = ""
        for _ in range(num_steps):
            for number, event in engine.step():
                text += event.text if number == 2 and isinstance(event, TextDelta) else ""
        engine.abort(1)
        engine.scheduler.check()
        for number, event in drain(engine):
            assert number == 2
            text += event.text if isinstance(event, TextDelta) else ""
        assert text == plain
        assert_nothing_left(engine)
        assert not drafter.num_steps


def test_drafts_and_prompt_chunks_in_one_step() -> None:
    """Both give the same text as alone."""
    runner = FakeRunner(num_blocks=100, max_context=600)
    plain = {
        i: reply_to(make_engine(runner), "word " * 80 * i + "?", max_tokens=40, ignore_eos=True)
        for i in (1, 0)
    }
    engine, _ = speculating(runner)
    engine.scheduler.mixed_budget = 13
    submit(engine, 0, "?", max_tokens=40, ignore_eos=True)
    events = [*engine.step(), *engine.step()]
    submit(engine, 1, "word " * 80 + "?", max_tokens=40, ignore_eos=True)
    events += drain(engine)
    for i in (0, 1):
        text = "".join(e.text for n, e in events if n == i and isinstance(e, TextDelta))
        assert text == plain[i][0]


def test_unusable_logits_in_a_path_fail_only_their_request() -> None:
    runner = FakeRunner(lambda prefix: EOS if len(prefix) > 60 else 70 + len(prefix) % 5)
    plain, _ = reply_to(make_engine(runner), "good")
    runner.poisoned_token = 73
    engine, _ = speculating(runner, shape=DraftShape(8, 8), accuracy=1.0)
    submit(engine, 1, "Hi")
    events = [event for _, event in drain(engine)]
    assert isinstance(events[-1], LlmError)
    assert_nothing_left(engine)
    assert plain


GUIDES = [
    JsonGuide(
        schema='{"type": "object", "properties": {"name": {"enum": ["ab", "cd"]}, "age": '
        '{"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["name", "age"], '
        '"additionalProperties": false}'
    ),
    RegexGuide(pattern="(ab|cd)+x[0-9]{3}"),
    ChoiceGuide(options=("yes, of course", "no, never")),
]


@pytest.mark.parametrize("guide", GUIDES, ids=["json", "regex", "choice"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guided_replies_are_the_same_and_forced_tokens_are_drafted(
    guide: Any, temperature: float
) -> None:
    params = {"guide": guide, "temperature": temperature, "seed": 3, "max_tokens": 60}
    plain, plain_done = reply_to(make_engine(), "Hi", **params)
    engine, _ = speculating()
    text, done = reply_to(engine, "Hi", **params)
    assert text == plain and done.usage == plain_done.usage
    forced = make_engine()
    forced.speculate(None, FixedController(DraftShape(12, 12)))
    text, done = reply_to(forced, "Hi", **params)
    assert text == plain and done.usage == plain_done.usage
    if not isinstance(guide, RegexGuide):
        assert done.speculation.num_accepted > 3
        assert done.num_steps < plain_done.num_steps
    assert_nothing_left(forced)


def test_drafter_follows_open_prompts() -> None:
    engine, drafter = speculating()
    engine.open_draft(1, user("Hello the"), received_ns=0)
    list(drain(engine))
    engine.update_draft(1, user("Hello there, user"))
    list(drain(engine))
    engine.fork_draft(2, 1, received_ns=0)
    engine.truncate_draft(1, 5)
    engine.commit_draft(2, SamplingParams(max_tokens=20, ignore_eos=True), received_ns=0)
    text = "".join(e.text for _, e in drain(engine) if isinstance(e, TextDelta))
    assert text == reply_to(make_engine(), "Hello there, user", max_tokens=20, ignore_eos=True)[0]
    engine.abort(1)
    assert_nothing_left(engine)


def test_ngram_drafts_repeat_the_text() -> None:
    runner = saying("abcdeabcdeabcdeabcde", "Hi", EOS)
    plain, plain_done = reply_to(make_engine(runner), "Hi")
    engine = make_engine(runner)
    engine.speculate(NgramDrafter(), FixedController(CHAIN))
    text, done = reply_to(engine, "Hi")
    assert text == plain and done.usage == plain_done.usage
    assert done.speculation.num_accepted >= 9
    assert done.num_steps < plain_done.num_steps - 8
