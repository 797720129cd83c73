"""The engine by hand: events, counts, aborts and errors, with a fake model whose KV is checked, and
with the real decoder on random weights."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_core.batch import ForwardBatch, ForwardResult
from llm_core.chat.template import ChatTemplate
from llm_core.config import ModelConfig
from llm_core.engine.engine import Engine
from llm_core.errors import (
    EngineBusyError,
    InvalidRequestError,
    LlmError,
    ModelLoadError,
    PromptTooLongError,
)
from llm_core.loading.model_files import load_template
from llm_core.messages import (
    ChatMessage,
    EngineConfig,
    FirstToken,
    GenerationDone,
    JsonGuide,
    PrefillResult,
    RegexGuide,
    SamplingParams,
    TextDelta,
)
from tests.support.tiny_model import CONTROL, TEMPLATE, TOKENS, tiny_tokenizer, write_tiny_gguf

EOS = 2
Choose = Callable[[list[int]], int]


class FakeRunner:
    """Has the interface of ModelRunner. Its KV are the tokens up to each position, so that
    rows that are missing, stale or of another sequence fail; its logits follow from all tokens of
    the prefix."""

    samples_on_device = False
    sampler_backend = None

    def __init__(
        self,
        choose: Choose | None = None,
        *,
        num_blocks: int = 40,
        block_size: int = 16,
        max_context: int = 200,
    ) -> None:
        self.config = ModelConfig(
            num_layers=1,
            hidden_size=2,
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
            intermediate_size=2,
            vocab_size=len(TOKENS),
            context_len=max_context,
        )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_context = max_context
        self.poisoned_token: int | None = None
        self.num_rows = 0
        self._choose = choose
        self._kv: list[tuple[int, ...]] = [()] * (num_blocks * block_size)

    @property
    def info_fields(self) -> dict[str, Any]:
        return {
            "name": "fake",
            "context_len": self.max_context,
            "vocab_size": len(TOKENS),
            "num_layers": 1,
            "weight_format": "none",
            "num_threads": 1,
        }

    def copy_block_rows(self, src_block: int, dst_block: int, num_rows: int) -> None:
        src, dst = src_block * self.block_size, dst_block * self.block_size
        self._kv[dst : dst + num_rows] = self._kv[src : src + num_rows]

    def move_rows(self, block_ids: Sequence[int], start: int, rows: Sequence[int]) -> None:
        kept = [self._kv[self._place(block_ids, start + row)] for row in rows]
        for at, row in enumerate(kept, start):
            self._kv[self._place(block_ids, at)] = row

    def _place(self, block_ids: Sequence[int], position: int) -> int:
        block, row = divmod(position, self.block_size)
        return block_ids[block] * self.block_size + row

    def forward(self, batch: ForwardBatch) -> ForwardResult:
        prefixes = []
        ids = iter(batch.token_ids.tolist())
        for segment in batch.segments:
            assert 0 < segment.end <= self.max_context
            blocks, start = segment.block_ids, segment.start
            before = self._kv[self._place(blocks, start - 1)] if start else ()
            assert len(before) == start, "rows before the segment are computed"
            for position in range(start):
                row = self._kv[self._place(blocks, position)]
                assert row == before[: position + 1], "of this sequence"
            rows: list[tuple[int, ...]] = []
            for parent in segment.parents or range(-1, segment.length - 1):
                rows.append((*(before if parent < 0 else rows[parent]), next(ids)))
                self._kv[self._place(blocks, start + len(rows) - 1)] = rows[-1]
            prefixes += map(list, rows)
        self.num_rows += len(prefixes)
        wanted = [prefixes[row] for row in batch.logit_rows.tolist()]
        logits = [self._logits(prefix) for prefix in wanted]
        rows_of_logits = np.array(logits, dtype=np.float32).reshape(-1, len(TOKENS))
        return ForwardResult(torch.from_numpy(rows_of_logits))

    def _logits(self, prefix: list[int]) -> np.ndarray:
        seed = zlib.crc32(np.array(prefix, dtype=np.int64).tobytes())
        row = np.random.default_rng(seed).standard_normal(len(TOKENS)) * 3
        if self._choose is not None:
            row[self._choose(prefix)] = 100.0
        if self.poisoned_token in prefix:
            row[5] = np.nan
        return row


def user(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text)]


def prompt_of(text: str) -> list[int]:
    template = ChatTemplate(TEMPLATE, control_tokens=CONTROL)
    return tiny_tokenizer().encode_pieces(template.render(user(text)))


def make_engine(runner: FakeRunner | None = None, **kwargs: Any) -> Engine:
    template = ChatTemplate(TEMPLATE, control_tokens=CONTROL)
    return Engine(runner or FakeRunner(), tiny_tokenizer(), template, **kwargs)


def saying(text: str, prompt: str, *then: int) -> FakeRunner:
    """A model whose reply to ``prompt`` is ``text`` in single bytes, and then the tokens."""
    reply = [*(TOKENS.index(c) for c in map(byte_char, text.encode())), *then]
    prompt_len = len(prompt_of(prompt))
    return FakeRunner(lambda prefix: reply[(len(prefix) - prompt_len) % len(reply)])


def byte_char(byte: int) -> str:
    return TOKENS[3 + byte]


def submit(engine: Engine, request_id: int, text: str, **params: Any) -> None:
    engine.submit(request_id, user(text), SamplingParams(**params), received_ns=0)


def drain(engine: Engine) -> Iterator[tuple[int, Any]]:
    while engine.has_work:
        engine.scheduler.check()
        yield from engine.step()
    engine.scheduler.check()
    assert engine.step() == []


def reply_to(engine: Engine, text: str, **params: Any) -> tuple[str, GenerationDone]:
    submit(engine, 1, text, **params)
    events = [event for _, event in drain(engine)]
    assert isinstance(events[0], FirstToken)
    assert isinstance(events[-1], GenerationDone)
    assert all(isinstance(event, TextDelta) and event.text for event in events[1:-1])
    return "".join(event.text for event in events[1:-1]), events[-1]


def assert_nothing_left(engine: Engine) -> None:
    engine.scheduler.check()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_drafts) == (0, 0, 0)
    assert stats.num_free_blocks + stats.num_pinned_blocks == stats.num_blocks


def test_a_reply_ends_at_eos_with_right_counts() -> None:
    engine = make_engine(saying("Hé 🙂", "Hi", EOS, 77))
    text, done = reply_to(engine, "Hi", max_tokens=50)
    assert text == "Hé 🙂"
    assert done.finish_reason == "stop"
    num_bytes = len("Hé 🙂".encode())
    assert done.usage.prompt_tokens == len(prompt_of("Hi"))
    assert done.usage.completion_tokens == num_bytes + 1
    assert done.num_steps == num_bytes + 1
    assert_nothing_left(engine)


def test_deltas_count_tokens_and_hold_whole_characters() -> None:
    engine = make_engine(saying("aé🙂", "Hi", EOS))
    submit(engine, 1, "Hi")
    deltas = [event for _, event in drain(engine) if isinstance(event, TextDelta)]
    assert [(delta.text, delta.num_tokens) for delta in deltas] == [("a", 1), ("é", 3), ("🙂", 7)]


def test_eos_as_first_token_is_an_empty_reply() -> None:
    text, done = reply_to(make_engine(saying("", "Hi", EOS)), "Hi")
    assert (text, done.finish_reason, done.usage.completion_tokens) == ("", "stop", 1)


def test_ignored_eos_goes_on_and_shows_nothing() -> None:
    engine = make_engine(saying("ab", "Hi", EOS))
    text, done = reply_to(engine, "Hi", max_tokens=7, ignore_eos=True)
    assert (text, done.finish_reason, done.usage.completion_tokens) == ("ababa", "length", 7)


def test_max_tokens_is_exact() -> None:
    for max_tokens in (1, 2, 5):
        text, done = reply_to(make_engine(saying("abcdefgh", "Hi")), "Hi", max_tokens=max_tokens)
        assert text == "abcdefgh"[:max_tokens]
        assert (done.finish_reason, done.usage.completion_tokens) == ("length", max_tokens)


def test_stop_string_over_tokens_and_nothing_after_it() -> None:
    engine = make_engine(saying("One. STOP two", "Hi", EOS))
    text, done = reply_to(engine, "Hi", stop=("STOP", "zzz"))
    assert (text, done.finish_reason) == ("One. ", "stop")
    assert done.usage.completion_tokens == len("One. STOP")
    assert_nothing_left(engine)


def test_beginning_of_a_stop_string_is_given_out_at_the_end() -> None:
    for params, reason in (({"max_tokens": 4}, "length"), ({}, "stop")):
        engine = make_engine(saying("ab##", "Hi", EOS))
        text, done = reply_to(engine, "Hi", stop=("###",), **params)
        assert (text, done.finish_reason) == ("ab##", reason)


def test_max_tokens_is_cut_to_the_context() -> None:
    prompt_len = len(prompt_of("Hi"))
    runner = FakeRunner(lambda prefix: 70, max_context=prompt_len + 9)
    _, done = reply_to(make_engine(runner), "Hi", max_tokens=1000)
    assert (done.finish_reason, done.usage.completion_tokens) == ("length", 9)


def test_too_long_prompts_are_refused_with_numbers() -> None:
    prompt_len = len(prompt_of("Hi"))
    engine = make_engine(FakeRunner(max_context=prompt_len))
    with pytest.raises(PromptTooLongError, match=rf"{prompt_len} tokens.*context of {prompt_len}"):
        submit(engine, 1, "Hi")
    with pytest.raises(PromptTooLongError, match="bytes"):
        submit(engine, 1, "x" * 1_000_000)
    with pytest.raises(PromptTooLongError):
        engine.submit_prefill(1, user("Hi"), received_ns=0)
    assert_nothing_left(engine)


def test_bad_requests_leave_nothing() -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match="top_p"):
        submit(engine, 1, "Hi", top_p=0.0)
    with pytest.raises(InvalidRequestError, match="at least one"):
        engine.submit(1, [], SamplingParams(), received_ns=0)
    with pytest.raises(InvalidRequestError, match="Unicode"):
        submit(engine, 1, "\ud800")
    assert_nothing_left(engine)


def test_busy_when_the_queue_is_full() -> None:
    engine = make_engine(max_sequences=1, max_waiting=1)
    submit(engine, 1, "a")
    engine.step()
    submit(engine, 2, "b")
    with pytest.raises(EngineBusyError):
        submit(engine, 3, "c")
    ids = {request_id for request_id, event in drain(engine) if isinstance(event, GenerationDone)}
    assert ids == {1, 2}


def test_user_text_cannot_end_a_turn() -> None:
    engine = make_engine(saying("ok", "a<|im_end|>", EOS))
    text, done = reply_to(engine, "a<|im_end|>")
    assert text == "ok"
    assert done.usage.prompt_tokens == len(prompt_of("a")) + len("<|im_end|>")


def test_prefill_makes_the_next_request_start_from_the_cache() -> None:
    runner = FakeRunner(lambda prefix: EOS)
    engine = make_engine(runner)
    engine.submit_prefill(1, user("a long question"), received_ns=0)
    prompt_len = len(prompt_of("a long question"))
    assert list(drain(engine)) == [(1, PrefillResult(prompt_tokens=prompt_len, cached_tokens=0))]
    assert engine.stats().cached_tokens == prompt_len
    rows_before = runner.num_rows
    _, done = reply_to(engine, "a long question")
    assert done.usage.cached_tokens == prompt_len - 1
    assert runner.num_rows == rows_before + 1


def test_instants_are_in_order() -> None:
    ticks = itertools.count(1000)
    engine = make_engine(saying("abc", "Hi", EOS), clock=lambda: next(ticks))
    submit(engine, 1, "Hi")
    events = [event for _, event in drain(engine)]
    first, done = events[0], events[-1]
    assert first.received_ns == 0
    assert 1000 <= first.scheduled_ns < first.first_token_ns < done.finished_ns


def test_unusable_logits_end_their_request_alone() -> None:
    runner = FakeRunner(lambda prefix: EOS if len(prefix) > 60 else 70)
    runner.poisoned_token = TOKENS.index("Z")
    engine = make_engine(runner)
    submit(engine, 1, "Z")
    submit(engine, 2, "good")
    events = list(drain(engine))
    errors = [(i, event) for i, event in events if isinstance(event, LlmError)]
    assert [i for i, _ in errors] == [1]
    assert isinstance(events[-1][1], GenerationDone) and events[-1][0] == 2
    assert_nothing_left(engine)


def test_padding_of_the_models_vocabulary_is_never_chosen() -> None:
    class Padded(FakeRunner):
        def forward(self, batch: ForwardBatch) -> ForwardResult:
            logits = super().forward(batch).logits
            return ForwardResult(torch.cat([logits, torch.full((len(logits), 9), 1000.0)], dim=1))

    plain, _ = reply_to(make_engine(FakeRunner()), "Hi", max_tokens=9)
    assert reply_to(make_engine(Padded()), "Hi", max_tokens=9)[0] == plain


def test_abort_at_every_moment() -> None:
    """Before any step, in the prompt, and after each token; the other request never notices."""
    engine = make_engine(max_sequences=2)
    engine.scheduler.prompt_budget = engine.scheduler.mixed_budget = 7
    submit(engine, 1, "the question that stays", max_tokens=12, ignore_eos=True)
    alone = [event.text for _, event in drain(engine) if isinstance(event, TextDelta)]
    for num_steps in range(25):
        submit(engine, 10, "the question that is aborted", max_tokens=9, ignore_eos=True)
        submit(engine, 20, "the question that stays", max_tokens=12, ignore_eos=True)
        submit(engine, 30, "waiting for a place", max_tokens=1)
        events = [output for _ in range(num_steps) for output in engine.step()]
        engine.abort(10)
        engine.abort(30)
        engine.scheduler.check()
        after = list(drain(engine))
        assert not [i for i, _ in after if i in (10, 30)], "an aborted request is silent"
        texts = [e.text for i, e in events + after if i == 20 and isinstance(e, TextDelta)]
        assert texts == alone
        assert_nothing_left(engine)


def test_abort_of_unknown_or_finished_requests_is_harmless() -> None:
    engine = make_engine(saying("a", "Hi", EOS))
    reply_to(engine, "Hi")
    engine.abort(1)
    engine.abort(99)
    assert_nothing_left(engine)


PARAMS = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_p": 0.8, "seed": 2},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.02, "seed": 3},
    {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"presence_penalty": 1.0},
    {"temperature": 1.0, "seed": 5, "logit_bias": {70: 6.0, 71: -100.0}, "logprobs": 2},
    {"temperature": 1.5, "seed": 6, "min_tokens": 1, "stop": ("a",)},
    {"temperature": 1.0, "seed": 7, "guide": RegexGuide(pattern="[a-d ]{2,6}")},
    {"guide": JsonGuide()},
)


@given(
    seed=st.integers(0, 10**6),
    num_sequences=st.integers(1, 4),
    num_blocks=st.integers(6, 30),
    budget=st.integers(1, 50),
)
@settings(max_examples=40, deadline=None)
def test_output_never_depends_on_company(
    seed: int, num_sequences: int, num_blocks: int, budget: int
) -> None:
    """Random arrivals, parameters, prefills and aborts: every reply equals its reply alone."""
    rng = random.Random(seed)
    engine = make_engine(FakeRunner(num_blocks=num_blocks), max_sequences=num_sequences)
    engine.scheduler.prompt_budget = engine.scheduler.mixed_budget = budget
    compare_with_alone(engine, make_engine, rng)


def compare_with_alone(
    engine: Engine, make_alone: Callable[[], Engine], rng: random.Random
) -> None:
    asked: dict[int, tuple[str, dict[str, Any]]] = {}
    texts: dict[int, str] = {}
    for request_id in range(1, 13):
        text = "be kind. " * rng.randint(0, 2) + rng.choice(("hello", "what", "the end", "x"))
        params = {**rng.choice(PARAMS), "max_tokens": rng.randint(1, 10)}
        if rng.random() < 0.2:
            engine.submit_prefill(100 + request_id, user(text), received_ns=0)
        submit(engine, request_id, text, **params)
        asked[request_id] = (text, params)
        for _ in range(rng.randint(0, 6)):
            collect(engine, texts)
        if rng.random() < 0.2:
            victim = rng.choice(list(asked))
            engine.abort(victim)
            asked.pop(victim)
        engine.scheduler.check()
    while engine.has_work:
        collect(engine, texts)
    assert_nothing_left(engine)
    for request_id, (text, params) in asked.items():
        assert texts.get(request_id, "") == reply_to(make_alone(), text, **params)[0]


def collect(engine: Engine, texts: dict[int, str]) -> None:
    for request_id, event in engine.step():
        if isinstance(event, TextDelta):
            texts[request_id] = texts.get(request_id, "") + event.text


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


def load(path: Path, max_sequences: int) -> Engine:
    return Engine.load(EngineConfig(model_path=str(path), max_sequences=max_sequences))


def test_the_real_decoder_gives_every_request_its_reply_alone(tiny_path: Path) -> None:
    alone = load(tiny_path, 1)
    for seed in range(6):
        engine = load(tiny_path, 3)
        engine.scheduler.prompt_budget, engine.scheduler.mixed_budget = 16, 5
        compare_with_alone(engine, lambda: alone, random.Random(seed))


def test_the_real_decoder_reuses_a_prefix(tiny_path: Path) -> None:
    engine = load(tiny_path, 2)
    cold, first = reply_to(engine, "tell me the story", max_tokens=8)
    warm, second = reply_to(engine, "tell me the story", max_tokens=8)
    assert warm == cold
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (
        0,
        first.usage.prompt_tokens - 1,
    )


def test_loading_what_is_no_chat_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        load(tmp_path / "missing.gguf", 1)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelLoadError):
        load(broken, 1)
    with pytest.raises(ModelLoadError, match="chat template"):
        load(write_tiny_gguf(tmp_path / "base.gguf", template=None), 1)
    with pytest.raises(ModelLoadError, match="line 1"):
        load(write_tiny_gguf(tmp_path / "bad.gguf", template="{% if %}"), 1)


def test_template_of_a_file_without_one() -> None:
    with pytest.raises(ModelLoadError, match="chat template"):
        load_template({}, tiny_tokenizer())
