"""An engine that learns of a step's tokens after it has launched the next one says what an engine
says that waits for each: whatever is asked of it, and whatever comes between."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch

from llm_core.batch import ForwardBatch
from llm_core.chat.template import ChatTemplate
from llm_core.engine.engine import Engine
from llm_core.errors import LlmError
from llm_core.messages import (
    ChatMessage,
    ChoiceGuide,
    FirstToken,
    GenerationDone,
    PrefillResult,
    RegexGuide,
    RequestOptions,
    SamplingParams,
    TextDelta,
)
from llm_core.model.backend import RunnerOptions
from llm_core.model.runner import ModelRunner
from llm_core.scheduling.sequence import TokenSequence
from tests.support.fake_device import LateModel, make_late
from tests.support.gpu_guard import fresh_rng
from tests.support.random_llama import random_weights, tiny_config
from tests.support.tiny_model import CONTROL, TEMPLATE, TOKENS, tiny_tokenizer

NUM_REQUESTS = 24
WORDS = ("hello", "what", "the end", "x", "in the user", "hello hello", "tell me")


@cache
def runners() -> tuple[ModelRunner, ModelRunner, LateModel]:
    """One that waits and one that does not, with a pool that is soon full."""
    config = tiny_config(
        vocab_size=len(TOKENS) + 5,  # padded: some are no words
        context_len=120,
        hidden_size=32,
        num_heads=2,
        num_layers=1,
    )
    weights = random_weights(config)
    plain, late = (
        ModelRunner(config, weights, RunnerOptions(num_blocks=26, block_size=8)) for _ in range(2)
    )
    return plain, late, make_late(late)


@dataclass
class Ask:
    """A request, and the number of events after which it comes."""

    after: int
    text: str
    params: SamplingParams
    is_aborted_after: int | None = None


@dataclass
class Said:
    text: str = ""
    num_tokens: int = 0
    reason: str = ""
    logprobs: list[tuple[bytes, float]] = field(default_factory=list)


def random_params(rng: random.Random, number: int) -> SamplingParams:
    """Plain ones mostly; some that the host must choose for."""
    kind = rng.randrange(12)
    special = {
        0: {"guide": RegexGuide(pattern="[a-c]{3,9}")},
        1: {"guide": ChoiceGuide(options=("yes", "no", "yes please"))},
        2: {"repetition_penalty": 1.3},
        3: {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        4: {"logit_bias": {40: 4.0}},
        5: {"logprobs": 2},
        6: {"min_tokens": rng.randint(1, 12), "max_tokens": rng.randint(12, 30)},
    }.get(kind, {})
    stop = tuple(chr(rng.randint(97, 122)) for _ in range(rng.choice((0, 0, 2, 6))))
    return SamplingParams(
        **{
            "max_tokens": rng.choice((1, 2, rng.randint(3, 40))),
            "temperature": rng.choice((0.0, 0.0, rng.uniform(0.3, 1.5))),
            "top_k": rng.choice((0, 0, 1, rng.randint(2, 50))),
            "top_p": rng.choice((1.0, rng.uniform(0.2, 0.99))),
            "min_p": rng.choice((0.0, 0.0, 0.05)),
            "seed": number + (rng.getrandbits(64) & ~0xFFFF),
            "stop": stop,
            "ignore_eos": rng.random() < 0.5,
            **special,
        }
    )


def random_asks(rng: random.Random) -> list[Ask]:
    asks = []
    for number in range(NUM_REQUESTS):
        words = " ".join(rng.choices(WORDS, k=rng.randint(1, 4)))
        aborted = rng.randint(1, 30) if rng.random() < 0.15 else None
        asks.append(Ask(3 * number, words, random_params(rng, number), aborted))
    return asks


def make_engine(runner: ModelRunner, *, overlaps: bool) -> Engine:
    template = ChatTemplate(TEMPLATE, control_tokens=CONTROL)
    engine = Engine(
        runner,
        tiny_tokenizer(),
        template,
        max_sequences=5,
        max_waiting=NUM_REQUESTS,
        overlap_steps=overlaps,
    )
    engine.scheduler.prompt_budget, engine.scheduler.mixed_budget = 20, 9
    return engine


def converse(engine: Engine, asks: list[Ask]) -> dict[int, Said]:
    """What is said to each request that is not aborted."""
    said: dict[int, Said] = {}
    num_events, waiting, ended = 0, list(enumerate(asks)), set[int]()
    while waiting or engine.has_work:
        idle = not engine.has_work
        while waiting and (waiting[0][1].after <= num_events or idle):
            number, ask = waiting.pop(0)
            said[number] = Said()
            message = ChatMessage("user", ask.text)
            engine.submit(number, [message], ask.params, received_ns=0)
            idle = False
        for number, event in engine.step():
            assert number not in ended, "nothing is said after the end"
            num_events += 1
            match event:
                case TextDelta():
                    said[number].text += event.text
                    said[number].logprobs += [(t.token, t.logprob) for t in event.logprobs]
                case GenerationDone():
                    said[number].num_tokens = event.usage.completion_tokens
                    said[number].reason = event.finish_reason
                    ended.add(number)
                case FirstToken():
                    assert said[number].text == ""
                case _:
                    raise AssertionError(event)
        for number, ask in enumerate(asks):
            if ask.is_aborted_after is not None and ask.after + ask.is_aborted_after <= num_events:
                engine.abort(number)
        engine.scheduler.check()
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks, "all blocks are free"
    return {n: s for n, s in said.items() if asks[n].is_aborted_after is None}


@pytest.mark.parametrize("repeat", range(2))
def test_late_tokens_are_the_same_tokens(repeat: int) -> None:
    plain, late, model = runners()
    rng = fresh_rng()
    asks = random_asks(rng)
    expected = converse(make_engine(plain, overlaps=False), asks)
    model.most_in_flight = model.num_kept_rows = 0
    engine = make_engine(late, overlaps=True)
    found = converse(engine, asks)
    assert model.most_in_flight == 2, "steps overlapped"
    assert not model.in_flight
    for number, said in expected.items():
        assert (found[number].text, found[number].reason) == (said.text, said.reason), number
        assert found[number].num_tokens == said.num_tokens
        tokens = [token for token, _ in said.logprobs]
        assert [token for token, _ in found[number].logprobs] == tokens
        for (_, mine), (_, theirs) in zip(found[number].logprobs, said.logprobs, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-3)


def test_blocks_are_taken_from_who_expects_a_token() -> None:
    """A full pool: sequences lose their KV while their last token is on its way."""
    plain, late, model = runners()
    asks = [
        Ask(
            0,
            f"{n} {WORDS[n]}",
            SamplingParams(max_tokens=60, ignore_eos=True, seed=n, temperature=0.5 * (n % 2)),
        )  # fmt: skip
        for n in range(5)
    ]
    expected = converse(make_engine(plain, overlaps=False), asks)
    model.most_in_flight = 0
    engine = make_engine(late, overlaps=True)
    lost = 0
    release = engine.scheduler.tables.release

    def watched(sequence: TokenSequence) -> None:
        nonlocal lost
        lost += sequence.is_expecting and sequence.seq_id in engine._requests
        release(sequence)

    engine.scheduler.tables.release = watched  # type: ignore[method-assign]
    assert converse(engine, asks) == expected
    assert engine.stats().total_preempted > 0 and lost > 0 and model.most_in_flight == 2


def test_only_the_hosts_rows_leave_the_device() -> None:
    _, late, model = runners()
    model.num_kept_rows = model.most_in_flight = 0
    plain = SamplingParams(max_tokens=6, temperature=0.8, top_k=20, ignore_eos=True)
    converse(make_engine(late, overlaps=True), [Ask(0, "hello", plain)])
    assert model.num_kept_rows == 0 and model.most_in_flight == 2
    guided = SamplingParams(max_tokens=6, guide=RegexGuide(pattern="[ab]{4}"))
    model.most_in_flight = 0
    converse(make_engine(late, overlaps=True), [Ask(0, "hello", guided)])
    assert model.num_kept_rows == 4, "a row a token"
    assert model.most_in_flight == 1, "each of these steps is waited for"


def test_without_overlap_each_step_is_learnt_of_at_once() -> None:
    _, late, model = runners()
    model.most_in_flight = 0
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    engine = make_engine(late, overlaps=False)
    assert converse(engine, [Ask(0, "hello", params)])[0].num_tokens == 5
    assert model.most_in_flight == 1


def test_a_row_too_many_is_computed_and_thrown_away() -> None:
    """The step after the last token was launched before anybody knew that it was the last."""
    _, late, _ = runners()
    rows: list[int] = []
    launch = late.launch

    def watched(batch: ForwardBatch) -> object:
        rows.append(len(batch.token_ids))
        return launch(batch)

    late.launch = watched  # type: ignore[method-assign, assignment]
    try:
        engine = make_engine(late, overlaps=True)
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        said = converse(engine, [Ask(0, "x", params)])
    finally:
        late.launch = launch  # type: ignore[method-assign]
    assert said[0].num_tokens == 4
    assert rows[-4:] == [1, 1, 1, 1], "three follow tokens that are said, one the last"


def test_a_prompt_alone_is_done_when_it_is_computed() -> None:
    _, late, model = runners()
    engine = make_engine(late, overlaps=True)
    engine.submit(1, [ChatMessage("user", "hi")], SamplingParams(max_tokens=30), received_ns=0)
    engine.step()
    engine.open_draft(2, [ChatMessage("user", "hello the user")], received_ns=0)
    done: list[PrefillResult] = []
    while not done:
        done += [e for n, e in engine.step() if n == 2 and isinstance(e, PrefillResult)]
    assert not model.in_flight, "the step that ended it is over"
    engine.commit_draft(2, SamplingParams(max_tokens=2, ignore_eos=True), received_ns=0)
    engine.abort(1)
    events = []
    while engine.has_work:
        events += [event for number, event in engine.step() if number == 2]
    assert isinstance(events[-1], GenerationDone) and events[-1].usage.completion_tokens == 2


def test_a_request_that_runs_out_of_time_in_flight() -> None:
    _, late, model = runners()
    now_ns = 0
    template = ChatTemplate(TEMPLATE, control_tokens=CONTROL)
    engine = Engine(late, tiny_tokenizer(), template, overlap_steps=True, clock=lambda: now_ns)
    options = RequestOptions(timeout_ms=5)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    engine.submit(1, [ChatMessage("user", "hi")], params, received_ns=0, options=options)
    for _ in range(4):
        engine.step()
    assert model.in_flight
    now_ns = 10_000_000
    events = [event for _, event in engine.step()]
    assert len(events) == 1 and isinstance(events[0], LlmError)
    assert not engine.has_work and not model.in_flight


def test_unusable_logits_end_the_request_that_has_them() -> None:
    _, late, model = runners()
    engine = make_engine(late, overlaps=True)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    for number in (1, 2):
        engine.submit(number, [ChatMessage("user", "hi")], params, received_ns=0)
    tokens = torch.zeros(0)
    while len(tokens) < 2:  # until both have a row in one step
        engine.step()
        made = [step.made.tokens for step in model.in_flight]
        tokens = torch.zeros(0) if not made or made[-1] is None else made[-1]
    # What the device goes on with stays: a real one makes a row of zeros of -1.
    bad = torch.tensor([-1, *tokens.tolist()[1:]])
    model.in_flight[-1].made = replace(model.in_flight[-1].made, tokens=bad)
    failed = [(n, e) for n, e in engine.step() if isinstance(e, LlmError)]
    assert len(failed) == 1 and "unusable logits" in str(failed[0][1])
    other = 3 - failed[0][0]
    events = []
    while engine.has_work:
        events += engine.step()
    assert {number for number, _ in events} == {other}
    assert isinstance(events[-1][1], GenerationDone)
