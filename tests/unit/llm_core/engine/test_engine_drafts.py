"""Drafts, pins, timeouts, deadlines and long conversations, with the engine driven by hand."""

from __future__ import annotations

from typing import Any

import pytest

from llm_core.engine.engine import Engine
from llm_core.errors import (
    EngineBusyError,
    InvalidRequestError,
    PromptTooLongError,
    RequestTimeoutError,
)
from llm_core.messages import (
    ChatMessage,
    FirstToken,
    GenerationDone,
    PrefillResult,
    RequestOptions,
    SamplingParams,
    TextDelta,
    ToolSpec,
)
from tests.unit.llm_core.engine.test_engine import (
    EOS,
    FakeRunner,
    assert_nothing_left,
    drain,
    make_engine,
    prompt_of,
    reply_to,
    saying,
    submit,
    user,
)

LONG = "what is the capital of the country"


def text_of(events: list[tuple[int, Any]], request_id: int) -> str:
    return "".join(e.text for i, e in events if i == request_id and isinstance(e, TextDelta))


def open_draft(engine: Engine, request_id: int, text: str, **options: Any) -> None:
    engine.open_draft(request_id, user(text), received_ns=0, options=RequestOptions(**options))


def test_a_growing_transcript_computes_only_its_new_end() -> None:
    runner = FakeRunner()
    engine = make_engine(runner)
    open_draft(engine, 1, LONG[:12])
    first = prompt_of(LONG[:12])
    assert list(drain(engine)) == [(1, PrefillResult(prompt_tokens=len(first), cached_tokens=0))]
    before = runner.num_rows
    assert engine.update_draft(1, user(LONG)) is None
    second = prompt_of(LONG)
    ((_, result),) = drain(engine)
    assert (result.prompt_tokens, result.revision) == (len(second), 1)
    common = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert runner.num_rows - before == len(second) - common
    assert engine.stats().num_drafts == 1
    engine.abort(1)
    assert_nothing_left(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 50])
def test_a_committed_draft_says_what_a_plain_request_says(num_steps: int) -> None:
    """Committed before, in, and after the computing of its prompt."""
    plain, plain_done = reply_to(make_engine(), LONG, max_tokens=9, ignore_eos=True)
    engine = make_engine()
    engine.scheduler.prompt_budget = 16
    open_draft(engine, 1, LONG[:20] + " something else")
    for _ in range(num_steps):
        engine.step()
    engine.update_draft(1, user(LONG))
    for _ in range(num_steps):
        engine.step()
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    engine.commit_draft(1, params, received_ns=5)
    events = list(drain(engine))
    assert text_of(events, 1) == plain
    first, done = events[0][1], events[-1][1]
    assert isinstance(first, FirstToken) and isinstance(done, GenerationDone)
    assert done.usage.prompt_tokens == plain_done.usage.prompt_tokens
    if num_steps == 50:
        assert first.cached_tokens == len(prompt_of(LONG)) - 1
        assert done.num_steps == 9
    assert first.received_ns == 5 and first.scheduled_ns > 0
    assert_nothing_left(engine)


def test_forks_of_a_draft_go_their_own_ways() -> None:
    engine = make_engine(max_sequences=4)
    open_draft(engine, 1, LONG)
    list(drain(engine))
    assert isinstance(engine.fork_draft(2, 1, received_ns=0), PrefillResult)
    engine.update_draft(2, user(LONG + " in the south"))
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, seed=3)
    for number in (1, 2):
        engine.commit_draft(number, params, received_ns=0)
    events = list(drain(engine))
    for number, text in ((1, LONG), (2, LONG + " in the south")):
        alone, _ = reply_to(
            make_engine(), text, max_tokens=6, ignore_eos=True, temperature=1.0, seed=3
        )
        assert text_of(events, number) == alone
    assert_nothing_left(engine)


def test_truncation_to_a_token_and_what_cannot_be_truncated() -> None:
    engine = make_engine()
    open_draft(engine, 1, LONG)
    list(drain(engine))
    result = engine.truncate_draft(1, 7)
    assert result == PrefillResult(prompt_tokens=7, cached_tokens=0, revision=1)
    with pytest.raises(InvalidRequestError, match="from 1 to the draft's 7, got 8"):
        engine.truncate_draft(1, 8)
    assert_nothing_left(engine)


def test_errors_end_a_draft_and_name_its_absence() -> None:
    engine = make_engine(FakeRunner(max_context=60))
    open_draft(engine, 1, "Hi")
    with pytest.raises(PromptTooLongError):
        engine.update_draft(1, user("x" * 100))
    assert_nothing_left(engine)
    for call in (
        lambda: engine.update_draft(1, user("Hi")),
        lambda: engine.commit_draft(1, SamplingParams(), received_ns=0),
        lambda: engine.fork_draft(2, 1, received_ns=0),
        lambda: engine.truncate_draft(1, 3),
    ):
        with pytest.raises(InvalidRequestError, match="no open draft 1"):
            call()
    open_draft(engine, 3, "Hi")
    with pytest.raises(InvalidRequestError, match="top_p"):
        engine.commit_draft(3, SamplingParams(top_p=0), received_ns=0)
    assert_nothing_left(engine)


def test_abort_frees_all_blocks_before_the_next_step() -> None:
    engine = make_engine()
    submit(engine, 1, LONG * 3, max_tokens=50, ignore_eos=True)
    for _ in range(5):
        engine.step()
    assert engine.stats().num_free_blocks < engine.stats().num_blocks
    engine.abort(1)
    assert_nothing_left(engine)
    assert engine.step() == []


# Pins


def test_a_pinned_system_prompt_is_never_computed_again() -> None:
    engine = make_engine(FakeRunner(lambda prefix: EOS, num_blocks=24))
    system = ChatMessage(role="system", content="be kind and brief. ")
    assert engine.pin(1, [system], received_ns=0) is None
    ((_, pinned),) = drain(engine)
    assert isinstance(pinned, PrefillResult)
    stats = engine.stats()
    assert stats.num_pinned_blocks > 0 and stats.num_drafts == 0
    for text in "abcdefgh":  # far more than the pool holds
        submit(engine, 2, text * 100, max_tokens=1)
        list(drain(engine))
    assert engine.stats().total_evicted_blocks > 0
    engine.submit(3, [system, *user("Hi")], SamplingParams(max_tokens=1), received_ns=0)
    first = next(event for _, event in drain(engine) if isinstance(event, FirstToken))
    assert first.cached_tokens >= pinned.prompt_tokens
    assert_nothing_left(engine)
    again = engine.pin(4, [system], received_ns=0)
    assert again == PrefillResult(
        prompt_tokens=pinned.prompt_tokens, cached_tokens=pinned.prompt_tokens
    )
    assert not engine.has_work


def test_pins_may_not_fill_the_cache() -> None:
    engine = make_engine(FakeRunner(num_blocks=20))
    with pytest.raises(InvalidRequestError, match="at most a quarter"):
        engine.pin(1, [ChatMessage(role="system", content="x" * 150)], received_ns=0)
    assert_nothing_left(engine)


# Too long, too late


def test_a_prompt_longer_than_the_pool_is_refused_at_once() -> None:
    """Within the model's context, but more than the cache will ever hold."""
    engine = make_engine(FakeRunner(num_blocks=8, max_context=10_000))
    with pytest.raises(PromptTooLongError, match="KV cache of 112 tokens"):
        submit(engine, 1, "x" * 150)
    submit(engine, 2, "x" * 60, max_tokens=10_000, ignore_eos=True)
    done = list(drain(engine))[-1][1]
    assert isinstance(done, GenerationDone) and done.finish_reason == "length"
    assert done.usage.prompt_tokens + done.usage.completion_tokens == 112
    assert_nothing_left(engine)


def test_time_out_in_the_queue_is_an_error_and_not_one_token() -> None:
    now = [0]
    engine = make_engine(max_sequences=1, clock=lambda: now[0])
    submit(engine, 1, "first", max_tokens=100, ignore_eos=True)
    options = RequestOptions(timeout_ms=500)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    engine.submit(2, user("second"), params, received_ns=0, options=options)
    engine.step()
    now[0] = 500_000_000
    outputs = engine.step()
    ((_, error),) = [output for output in outputs if output[0] == 2]
    assert isinstance(error, RequestTimeoutError) and "while waiting" in str(error)
    assert engine.stats().total_timeouts == 1
    engine.abort(1)
    assert_nothing_left(engine)


def test_time_out_while_running_ends_the_reply_with_an_error() -> None:
    now = [0]
    engine = make_engine(clock=lambda: now[0])
    options = RequestOptions(timeout_ms=500)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    engine.submit(1, user("Hi"), params, received_ns=0, options=options)
    engine.step()
    now[0] = 600_000_000
    ((_, error),) = engine.step()
    assert isinstance(error, RequestTimeoutError) and "while running" in str(error)
    assert_nothing_left(engine)


def test_a_deadline_set_later_changes_the_order() -> None:
    engine = make_engine(max_sequences=1)
    for number, deadline_ns in ((1, 2_000), (2, 1_000)):
        options = RequestOptions(deadline_ns=deadline_ns)
        params = SamplingParams(max_tokens=1)
        engine.submit(number, user("Hi"), params, received_ns=0, options=options)
    engine.set_deadline(1, 500)
    engine.set_deadline(99, 1)
    assert [i for i, event in drain(engine) if isinstance(event, GenerationDone)] == [1, 2]


def test_tenants_do_not_share_prefixes() -> None:
    engine = make_engine(saying("a", "Hello", EOS))
    cached = []
    for number, salt in ((1, "a"), (2, "b"), (3, "a")):
        options = RequestOptions(cache_salt=salt)
        engine.submit(number, user("Hello"), SamplingParams(), received_ns=0, options=options)
        cached += [e.cached_tokens for _, e in drain(engine) if isinstance(e, FirstToken)]
    assert cached == [0, 0, len(prompt_of("Hello")) - 1]


def test_open_drafts_are_limited() -> None:
    engine = make_engine(max_waiting=2, max_sequences=1)
    for number in (1, 2):
        open_draft(engine, number, "Hi")
        list(drain(engine))
    with pytest.raises(EngineBusyError, match="drafts are open"):
        open_draft(engine, 3, "Hi")


# Long conversations


def conversation(num_turns: int) -> list[ChatMessage]:
    messages = [ChatMessage(role="system", content="SYS")]
    for number in range(num_turns):
        messages += user(f"question {number:02d}")
        messages.append(ChatMessage(role="assistant", content=f"answer {number:02d}"))
    return [*messages, *user("and now?")]


def ask(engine: Engine, messages: list[ChatMessage]) -> FirstToken:
    options = RequestOptions(overflow="drop_oldest")
    engine.submit(1, messages, SamplingParams(max_tokens=4), received_ns=0, options=options)
    return next(event for _, event in drain(engine) if isinstance(event, FirstToken))


def test_a_long_conversation_loses_its_oldest_turns_and_says_so() -> None:
    seen: list[list[int]] = []

    def look(prefix: list[int]) -> int:
        seen.append(prefix)
        return EOS

    engine = make_engine(FakeRunner(look, num_blocks=60, max_context=400))
    dropped, reused = [], 0
    for num_turns in range(1, 40):
        messages = conversation(num_turns)
        first = ask(engine, messages)
        assert first.prompt_tokens + 4 <= 400
        assert first.dropped_messages % 2 == 0, "whole turns"
        kept = [messages[0], *messages[1 + first.dropped_messages :]]
        expected = make_engine()._make._prompts.encode(kept)
        assert seen[-1] == expected, "the system prompt and the newest turns, nothing else"
        reused += first.cached_tokens > first.prompt_tokens // 2
        dropped.append(first.dropped_messages)
    assert dropped[0] == 0 and dropped[-1] > 30
    assert dropped == sorted(dropped)
    assert len(set(dropped)) < 15, "in coarse steps, so that the cached beginning stays of use"
    assert reused > 25
    assert_nothing_left(engine)


def test_room_made_in_advance_serves_the_next_turn() -> None:
    """A prefill with room to spare cuts what the answer would have had to cut."""
    engine = make_engine(FakeRunner(lambda prefix: EOS, num_blocks=60, max_context=400))
    for num_turns in range(1, 40):
        history, question = conversation(num_turns)[:-1], conversation(num_turns)[-1:]
        options = RequestOptions(overflow="drop_oldest", spare_tokens=60)
        engine.submit_prefill(1, history, received_ns=0, options=options)
        ((_, result),) = drain(engine)
        assert isinstance(result, PrefillResult)
        kept = [history[0], *history[1 + result.dropped_messages :]]
        first = ask(engine, [*kept, *question])
        assert first.dropped_messages == 0
        assert first.prompt_tokens - first.cached_tokens < 60, "only the question is read"
    assert result.dropped_messages > 30
    with pytest.raises(InvalidRequestError, match="spare_tokens: must be at least 0, got -1"):
        engine.submit_prefill(1, history, received_ns=0, options=RequestOptions(spare_tokens=-1))
    assert_nothing_left(engine)


def test_only_the_last_turn_is_too_long() -> None:
    engine = make_engine(FakeRunner(max_context=100))
    with pytest.raises(PromptTooLongError):
        ask(engine, [*conversation(9)[:-1], *user("x" * 200)])
    with pytest.raises(PromptTooLongError, match="bytes"):
        ask(engine, [*conversation(9)[:-1], *user("x" * 20_000)])
    with pytest.raises(InvalidRequestError, match="at least one"):
        ask(engine, [])
    assert_nothing_left(engine)


def test_tools_outlive_the_message_that_offers_them() -> None:
    engine = make_engine(FakeRunner(lambda prefix: EOS, max_context=200))
    prompts = engine._make._prompts
    tools = (ToolSpec(name="look_up"),)
    messages = [ChatMessage(role="user", content="x" * 150, tools=tools), *conversation(3)[1:]]
    rendered: list[Any] = []
    render = prompts._template.render
    prompts._template.render = lambda kept: rendered.append(kept) or render(kept)  # type: ignore[method-assign,assignment,func-returns-value]
    try:
        prompt = prompts.build(messages, reply_len=4, overflow="drop_oldest")
    except InvalidRequestError:  # a template that knows no tools refuses them
        pass
    else:
        assert prompt.num_dropped > 0
    assert rendered[-1][0].tools == tools


def test_without_being_asked_nothing_is_dropped() -> None:
    engine = make_engine(FakeRunner(max_context=200))
    with pytest.raises(PromptTooLongError, match="context of 200"):
        engine.submit(1, conversation(30), SamplingParams(max_tokens=4), received_ns=0)
