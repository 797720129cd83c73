"""An engine under random load, with a real float32 decoder: arrivals, forks, truncations, aborts,
preemptions, deadlines, a full pool, with drafters and without. After each step its books are right;
at the end no block is lost, and every request has said what it says alone.

``PARLEY_RANDOM_STEPS=10000`` sets how much is tried (rules applied, most of them several steps).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from llm_core.chat.template import ChatTemplate
from llm_core.engine.engine import Engine
from llm_core.errors import EngineBusyError, LlmError, PromptTooLongError
from llm_core.messages import (
    ChatMessage,
    GenerationDone,
    PolicyName,
    PrefillResult,
    RequestOptions,
    SamplingParams,
)
from llm_core.model.backend import RunnerOptions
from llm_core.model.runner import ModelRunner
from llm_core.scheduling.attention_window import AttentionWindow
from llm_core.scheduling.sequence import TokenSequence
from llm_core.speculative.drafters.base import Drafter, DraftShape
from llm_core.speculative.drafters.eagle import EagleDrafter
from llm_core.speculative.drafters.ngram import NgramDrafter
from llm_core.speculative.heads.eagle import EagleHead, TargetEmbeddings
from tests.support.fake_device import make_late
from tests.support.fake_drafter import GuessingDrafter, RestingController
from tests.support.random_heads import head_config, head_tensors
from tests.support.random_llama import random_weights, run_chunk, tiny_config
from tests.support.tiny_model import CONTROL, TEMPLATE, TOKENS, tiny_tokenizer

NUM_STEPS = int(os.environ.get("PARLEY_RANDOM_STEPS", "1200"))
STEPS_AN_EXAMPLE = 40
MAX_NEW = 48
TIE = 1e-4  # logits of random weights have standard deviation 1; sums differ by some 1e-6

BEGINNINGS = ("", "be kind. ", "be kind. be brief. ")
WORDS = ("hello", "what", "the end", "x", "in the user", "hello hello", "tell me")


@cache
def runners() -> tuple[ModelRunner, ModelRunner, ModelRunner]:
    """The one under test, with a pool of 16 small blocks; one for whoever is alone; and one as the
    first whose tokens are known late."""
    config = tiny_config(vocab_size=len(TOKENS), context_len=150, hidden_size=32, num_heads=2)
    weights = random_weights(config)
    crowded = ModelRunner(config, weights, RunnerOptions(num_blocks=16, block_size=8))
    late = ModelRunner(config, weights, RunnerOptions(num_blocks=16, block_size=8))
    make_late(late)
    return crowded, ModelRunner(config, weights, RunnerOptions(num_blocks=20, block_size=8)), late


@cache
def alone(prompt_ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """The greedy continuation, by a runner that computes nothing else."""
    runner = runners()[1]
    logits = run_chunk(runner, torch.tensor(prompt_ids))[-1]
    chosen = [int(logits[: len(TOKENS)].argmax())]
    while len(chosen) < num_tokens:
        start = len(prompt_ids) + len(chosen) - 1
        logits = run_chunk(runner, torch.tensor(chosen[-1:]), start=start)[0]
        chosen.append(int(logits[: len(TOKENS)].argmax()))
    return tuple(chosen)


def make_drafter(name: str) -> Drafter:
    """An EAGLE head of random weights guesses badly; the guessing one knows what follows."""
    if name == "ngram":
        return NgramDrafter()
    if name == "guessing":
        return GuessingDrafter(lambda tokens: alone(tuple(tokens), 1)[0], len(TOKENS))
    runner, config = runners()[0], runners()[0].config
    shape = head_config(config, "eagle3")
    target = TargetEmbeddings.of(config, random_weights(config))
    head = EagleHead(shape, head_tensors(shape), target, max_context=150)
    return EagleDrafter(head, num_blocks=16, block_size=runner.block_size, max_sequences=5)


def assert_says_what_it_says_alone(sequence: TokenSequence, model: Alone) -> None:
    prompt = tuple(sequence.token_ids[: sequence.prompt_len])
    said = tuple(sequence.token_ids[sequence.prompt_len :])
    expected = model.continuation(prompt, len(said))
    if said == expected:
        return
    at = next(i for i in range(len(said)) if said[i] != expected[i])
    logits = model.last_logits(prompt + expected[:at])
    gap = (logits[expected[at]] - logits[said[at]]).item()
    assert gap < TIE, f"token {at} of {said} should be {expected[at]} by {gap}"


class Alone:
    """What a request says that nothing else is computed beside."""

    def continuation(self, prompt_ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        """The greedy one."""
        return alone(prompt_ids, num_tokens)

    def last_logits(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        """float32 [vocab] behind the last of them."""
        return run_chunk(runners()[1], torch.tensor(token_ids))[-1]


@dataclass
class Asked:
    sequence: TokenSequence
    wants: int | None  # tokens; None for a draft
    revision: int = 0


class EngineMachine(RuleBasedStateMachine):
    """Each rule is one thing that a client does, or some steps of the engine."""

    model = Alone()
    window: AttentionWindow | None = None

    @initialize(
        policy=st.sampled_from(("deadline", "fcfs", "priority")),
        max_sequences=st.integers(2, 5),
        prompt_budget=st.integers(3, 40),
        mixed_budget=st.integers(2, 20),
        drafter=st.sampled_from((None, "late", "ngram", "eagle", "eagle", "guessing")),
        width=st.sampled_from((1, 3)),
    )
    def start(
        self,
        policy: PolicyName,
        max_sequences: int,
        prompt_budget: int,
        mixed_budget: int,
        drafter: str | None,
        width: int,
    ) -> None:
        self.now_ns = 0
        template = ChatTemplate(TEMPLATE, control_tokens=CONTROL)
        self.engine = Engine(
            runners()[2 if drafter == "late" else 0],
            tiny_tokenizer(),
            template,
            max_sequences=max_sequences,
            max_waiting=6,
            policy=policy,
            window=self.window,
            overlap_steps=drafter == "late",
            clock=lambda: self.now_ns,
        )
        if drafter is not None and drafter != "late" and self.window is None:
            shape = DraftShape(max_drafts=6, max_depth=4, width=width)
            controller = RestingController(shape, seed=prompt_budget, mean_steps=20)
            self.engine.speculate(make_drafter(drafter), controller)
        self.engine.scheduler.prompt_budget = prompt_budget
        self.engine.scheduler.mixed_budget = mixed_budget
        self.last_id = 0
        self.asked: dict[int, Asked] = {}
        self.done: list[tuple[TokenSequence, int]] = []

    def message(self, beginning: str, words: list[str]) -> list[ChatMessage]:
        return [ChatMessage(role="user", content=beginning + " ".join(words))]

    def ask(self, method: str, *args: Any, wants: int | None, **kwargs: Any) -> None:
        """Submits something new, and remembers its sequence if it is taken."""
        self.last_id += 1
        try:
            getattr(self.engine, method)(self.last_id, *args, received_ns=self.now_ns, **kwargs)
        except (EngineBusyError, PromptTooLongError):
            assert self.last_id not in self.engine._requests
            return
        sequence = self.engine._requests[self.last_id].sequence
        self.asked[self.last_id] = Asked(sequence, wants)

    def drafts(self) -> list[int]:
        return [number for number, asked in self.asked.items() if asked.wants is None]

    texts = {
        "beginning": st.sampled_from(BEGINNINGS),
        "words": st.lists(st.sampled_from(WORDS), min_size=1, max_size=4),
    }
    which = st.integers(0, 99)
    options = st.builds(
        RequestOptions,
        deadline_ns=st.one_of(st.none(), st.integers(0, 10**10)),
        priority=st.integers(-1, 1),
        cache_salt=st.sampled_from(("", "", "tenant")),
    )

    @rule(**texts, max_tokens=st.integers(1, MAX_NEW), options=options)
    def submit(
        self, beginning: str, words: list[str], max_tokens: int, options: RequestOptions
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        message = self.message(beginning, words)
        self.ask("submit", message, params, options=options, wants=max_tokens)

    @rule(**texts, options=options)
    def prefill(self, beginning: str, words: list[str], options: RequestOptions) -> None:
        self.ask("submit_prefill", self.message(beginning, words), options=options, wants=0)

    @rule(**texts, options=options)
    def open_draft(self, beginning: str, words: list[str], options: RequestOptions) -> None:
        self.ask("open_draft", self.message(beginning, words), options=options, wants=None)

    @precondition(lambda self: self.drafts())
    @rule(which=which, **texts)
    def update_draft(self, which: int, beginning: str, words: list[str]) -> None:
        number = self.drafts()[which % len(self.drafts())]
        self.asked[number].revision += 1
        self.engine.update_draft(number, self.message(beginning, words))

    @precondition(lambda self: self.drafts())
    @rule(which=which, share=st.floats(0.01, 1))
    def truncate_draft(self, which: int, share: float) -> None:
        number = self.drafts()[which % len(self.drafts())]
        self.asked[number].revision += 1
        num_tokens = max(1, int(share * self.asked[number].sequence.prompt_len))
        self.engine.truncate_draft(number, num_tokens)

    @precondition(lambda self: self.drafts())
    @rule(which=which)
    def fork_draft(self, which: int) -> None:
        number = self.drafts()[which % len(self.drafts())]
        self.ask("fork_draft", number, wants=None)

    @precondition(lambda self: self.drafts())
    @rule(which=which, max_tokens=st.integers(1, MAX_NEW), options=options)
    def commit_draft(self, which: int, max_tokens: int, options: RequestOptions) -> None:
        number = self.drafts()[which % len(self.drafts())]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.engine.commit_draft(number, params, received_ns=self.now_ns, options=options)
        self.asked[number].wants = max_tokens

    @precondition(lambda self: self.asked)
    @rule(which=which)
    def abort(self, which: int) -> None:
        number = list(self.asked)[which % len(self.asked)]
        del self.asked[number]
        self.engine.abort(number)

    @precondition(lambda self: self.asked)
    @rule(which=which, deadline_ns=st.integers(0, 10**10))
    def set_deadline(self, which: int, deadline_ns: int) -> None:
        self.engine.set_deadline(list(self.asked)[which % len(self.asked)], deadline_ns)

    @rule(count=st.integers(1, 8))
    def work_a_little(self, count: int) -> None:
        self.step(count)

    @rule(count=st.integers(10, 40))
    def work(self, count: int) -> None:
        self.step(count)

    def step(self, count: int) -> None:
        for _ in range(count):
            self.now_ns += 50_000_000
            for number, event in self.engine.step():
                assert not isinstance(event, LlmError), event
                if isinstance(event, GenerationDone):
                    asked = self.asked.pop(number)
                    assert event.usage.completion_tokens == asked.wants
                    self.done.append((asked.sequence, asked.wants or 0))
                elif isinstance(event, PrefillResult) and self.asked[number].wants is not None:
                    del self.asked[number]
                elif isinstance(event, PrefillResult):
                    assert event.revision == self.asked[number].revision
            self.engine.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for number in self.drafts():
            self.abort(list(self.asked).index(number))
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.step(1)
        assert not self.asked, "all that was asked is answered"
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_drafts) == (0, 0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        for sequence, wants in self.done:
            assert sequence.num_generated == wants
            assert_says_what_it_says_alone(sequence, self.model)


EngineMachine.TestCase.settings = settings(
    max_examples=max(1, NUM_STEPS // STEPS_AN_EXAMPLE),
    stateful_step_count=STEPS_AN_EXAMPLE,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
test_random_load = pytest.mark.timeout(3600)(EngineMachine.TestCase)


@pytest.mark.parametrize("drafter", ["guessing", "eagle", "ngram", None])
def test_a_draft_that_lost_its_blocks_begins_again_with_what_others_have_said(
    drafter: str | None,
) -> None:
    """Found by random load: after another's text was put in place of its own, the prefix cache had
    more of it than the draft had ever computed."""
    state = EngineMachine()
    state.start(
        policy="deadline",
        max_sequences=2,
        prompt_budget=40,
        mixed_budget=16,
        drafter=drafter,
        width=1,
    )
    ours, theirs = RequestOptions(), RequestOptions(cache_salt="tenant")
    state.open_draft(beginning="", words=["hello"], options=ours)
    for _ in range(4):
        state.fork_draft(which=0)
    state.open_draft(beginning="", words=["hello"], options=theirs)
    changed = state.asked[state.last_id].sequence
    state.submit(beginning="", words=["hello"], max_tokens=16, options=ours)
    state.submit(beginning="be kind. ", words=["tell me"], max_tokens=28, options=theirs)
    state.step(10)
    state.fork_draft(which=0)
    state.fork_draft(which=0)
    assert changed.computed_len == 0, "the others took its blocks"
    state.update_draft(which=5, beginning="be kind. ", words=["hello"])
    state.step(10)
    assert changed.computed_len == len(changed.token_ids)
    state.teardown()
