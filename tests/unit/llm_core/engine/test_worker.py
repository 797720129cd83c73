"""The worker beside its engine: guides that are made ready elsewhere, requests that fail alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from llm_core import ipc
from llm_core.engine.engine import Engine
from llm_core.engine.generation import Generation
from llm_core.errors import EngineBusyError, InternalError, InvalidRequestError
from llm_core.faults import failure_of
from llm_core.messages import ChoiceGuide, Guide, RegexGuide, RequestOptions, SamplingParams
from llm_core.structured.constraint import GuideState
from llm_core.structured.grammar import guide_key
from tests.support.worker_client import WorkerClient, user, working
from tests.unit.llm_core.engine.test_engine import make_engine

LETTERS = RegexGuide(pattern="[a-z]+")
YES = ChoiceGuide(options=("yes",))


def failed(client: WorkerClient, request_id: int, code: str) -> str:
    """The message of the failure that must come next for a request."""
    event = client.end_of(request_id)
    assert isinstance(event, ipc.Failed) and event.code == code, event
    return event.message


def succeeded(client: WorkerClient, request_id: int) -> None:
    event = client.end_of(request_id)
    assert not isinstance(event, ipc.Failed), event


def assert_nothing_left(client: WorkerClient, engine: Engine) -> None:
    stats = client.stats(900)
    assert (stats.num_running, stats.num_waiting, stats.num_drafts) == (0, 0, 0)
    assert stats.num_free_blocks == stats.num_blocks
    engine.check()


# --- guides ---


def test_others_go_on_while_a_guide_is_checked() -> None:
    engine = make_engine()
    with working(engine) as client:
        client.checker.gate.clear()
        client.generate(1, guide=YES, ignore_eos=False)
        client.generate(2)
        succeeded(client, 2)
        assert client.stats(3).num_waiting == 1
        client.checker.gate.set()
        succeeded(client, 1)
        text = "".join(
            event.event.text
            for event in client.events
            if isinstance(event, ipc.Generated)
            and event.request_id == 1
            and hasattr(event.event, "text")
        )
        assert text == "yes"
        client.generate(4, guide=YES)
        succeeded(client, 4)
        assert client.checker.asked == [YES], "the second reply finds it compiled"
        assert_nothing_left(client, engine)


def test_requests_with_one_guide_wait_for_one_check() -> None:
    engine = make_engine()
    with working(engine) as client:
        client.checker.gate.clear()
        client.send(ipc.PrepareGuide(1, LETTERS))
        for number in (2, 3):
            client.generate(number, guide=LETTERS)
        client.checker.gate.set()
        assert isinstance(client.end_of(1), ipc.GuidePrepared)
        for number in (2, 3):
            succeeded(client, number)
        assert client.checker.asked == [LETTERS]


def test_a_guide_that_another_engine_has_followed_is_not_checked() -> None:
    engine = make_engine()
    with working(engine, known={guide_key(YES): 77}) as client:
        client.send(ipc.PrepareGuide(1, YES))
        event = client.end_of(1)
        assert isinstance(event, ipc.GuidePrepared) and event.result.num_bytes == 77
        client.generate(2, guide=YES)
        succeeded(client, 2)
        client.generate(3, guide=LETTERS)
        succeeded(client, 3)
        assert client.checker.asked == [LETTERS]


def test_a_guide_that_is_refused_is_checked_once() -> None:
    engine = make_engine()
    with working(engine) as client:
        client.checker.refused[YES] = InvalidRequestError("choice: no")
        client.send(ipc.PrepareGuide(1, YES))
        assert failed(client, 1, "invalid_request") == "choice: no"
        client.generate(2, guide=YES)
        assert failed(client, 2, "invalid_request") == "choice: no"
        assert client.checker.asked == [YES]
        client.checker.refused[LETTERS] = EngineBusyError("regex: no time")
        client.generate(3, guide=LETTERS)
        failed(client, 3, "engine_busy")
        del client.checker.refused[LETTERS]
        client.generate(4, guide=LETTERS)
        succeeded(client, 4)
        assert_nothing_left(client, engine)


def test_a_request_that_waits_for_its_guide_can_be_aborted() -> None:
    engine = make_engine()
    with working(engine) as client:
        client.checker.gate.clear()
        client.generate(1, guide=YES)
        client.send(ipc.Abort(1))
        assert client.stats(2).num_waiting == 0
        client.checker.gate.set()
        client.generate(3, guide=YES)
        succeeded(client, 3)
        assert all(getattr(event, "request_id", None) != 1 for event in client.events)


def test_a_deadline_finds_a_request_that_waits_for_its_guide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()
    deadlines: list[int | None] = []
    submit = engine.submit

    def noting(*args: Any, options: RequestOptions, **kwargs: Any) -> None:
        deadlines.append(options.deadline_ns)
        submit(*args, options=options, **kwargs)

    monkeypatch.setattr(engine, "submit", noting)
    with working(engine) as client:
        client.checker.gate.clear()
        client.generate(1, guide=YES)
        client.send(ipc.SetDeadline(1, 12_345))
        client.stats(2)
        client.checker.gate.set()
        succeeded(client, 1)
    assert deadlines == [12_345]


def test_too_many_requests_that_wait_for_guides_are_refused() -> None:
    engine = make_engine()
    with working(engine, max_held=2) as client:
        client.checker.gate.clear()
        for number in range(1, 4):
            client.generate(number, guide=ChoiceGuide(options=(str(number),)))
        assert "2 requests wait for their guides" in failed(client, 3, "engine_busy")
        client.checker.gate.set()
        for number in (1, 2):
            succeeded(client, number)


def test_urgent_guides_come_first() -> None:
    engine = make_engine()
    guides: list[Guide] = [ChoiceGuide(options=(str(n),)) for n in range(4)]
    with working(engine) as client:
        client.checker.gate.clear()
        for number, (guide, priority) in enumerate(zip(guides, (0, -1, 0, 1), strict=True)):
            options = RequestOptions(priority=priority)
            params = SamplingParams(max_tokens=1, guide=guide)
            client.send(ipc.Generate(number, user("Hi"), params, options))
            assert client.checker.is_at_work.wait(30), "at the first one, when the others come"
        client.stats(9)
        client.checker.gate.set()
        succeeded(client, 1)
    assert client.checker.asked == [guides[n] for n in (0, 3, 2, 1)]


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_draft_that_is_committed_with_a_guide(is_refused: bool) -> None:
    engine = make_engine()
    with working(engine) as client:
        if is_refused:
            client.checker.refused[YES] = InvalidRequestError("choice: no")
        client.send(ipc.OpenDraft(1, user("Hello"), RequestOptions()))
        client.end_of(1)
        params = SamplingParams(guide=YES, max_tokens=5)
        client.send(ipc.CommitDraft(1, params, RequestOptions()))
        if is_refused:
            failed(client, 1, "invalid_request")
        else:
            succeeded(client, 1)
        assert_nothing_left(client, engine)


# --- faults ---


class PanicException(BaseException):
    """By this name a panic of a Rust library arrives."""


Fault = Callable[[pytest.MonkeyPatch, Engine, BaseException], None]


def in_the_template(patch: pytest.MonkeyPatch, engine: Engine, error: BaseException) -> None:
    make = engine._make.prompt

    def prompt(messages: Any, *args: Any, **kwargs: Any) -> Any:
        if messages[0].content == "boom":
            raise error
        return make(messages, *args, **kwargs)

    patch.setattr(engine._make, "prompt", prompt)


def in_the_sampler(patch: pytest.MonkeyPatch, engine: Engine, error: BaseException) -> None:
    choose = Generation.choose

    def choosing(self: Generation, *args: Any) -> int:
        if self._params.seed == 13 and self._sequence.num_generated == 3:
            raise error
        return choose(self, *args)

    patch.setattr(Generation, "choose", choosing)


def behind_the_token(patch: pytest.MonkeyPatch, engine: Engine, error: BaseException) -> None:
    finish = Generation._finish_reason

    def finishing(self: Generation, is_eos: bool) -> Any:
        if self._params.seed == 13:
            raise error
        return finish(self, is_eos)

    patch.setattr(Generation, "_finish_reason", finishing)


def in_the_guide(patch: pytest.MonkeyPatch, engine: Engine, error: BaseException) -> None:
    def allowed(self: GuideState) -> Any:
        raise error

    patch.setattr(GuideState, "allowed", allowed)


@pytest.mark.parametrize("place", [in_the_template, in_the_sampler, behind_the_token, in_the_guide])
@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), PanicException("a panic")])
def test_a_fault_of_one_request_is_its_own(
    place: Fault,
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine()
    place(monkeypatch, engine, error)
    with caplog.at_level(logging.ERROR), working(engine) as client:
        client.generate(1, "one", max_tokens=30)
        client.generate(2, "boom", seed=13, temperature=1.0, guide=LETTERS)
        client.generate(3, "three", max_tokens=30)
        message = failed(client, 2, "internal_error")
        assert type(error).__name__ in message and str(error) not in message
        for number in (1, 3):
            succeeded(client, number)
        client.generate(4, "again")
        succeeded(client, 4)
        assert_nothing_left(client, engine)
    assert client.fault is None
    (record,) = caplog.records
    assert record.getMessage().startswith("request 2 failed: ")
    assert record.exc_info is not None and record.exc_info[1] is error


@pytest.mark.parametrize("name", ["update_draft", "truncate_draft", "commit_draft", "fork_draft"])
def test_a_fault_in_a_drafts_change_ends_the_draft(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()

    def fails(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(engine, name, fails)
    command: ipc.Command = {
        "update_draft": ipc.UpdateDraft(1, user("Hello you")),
        "truncate_draft": ipc.TruncateDraft(1, 3),
        "commit_draft": ipc.CommitDraft(1, SamplingParams(), RequestOptions()),
        "fork_draft": ipc.ForkDraft(2, 1),
    }[name]
    with working(engine) as client:
        client.send(ipc.OpenDraft(1, user("Hello"), RequestOptions()))
        client.end_of(1)
        client.send(command)
        failed(client, 2 if name == "fork_draft" else 1, "internal_error")
        client.send(ipc.Abort(1))
        assert_nothing_left(client, engine)


def test_a_fault_that_breaks_the_accounts_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()
    choose = Generation.choose

    def leaking(self: Generation, *args: Any) -> int:
        if self._params.seed == 13:
            engine.scheduler.tables.pool.allocate(1)
            raise ZeroDivisionError
        return choose(self, *args)

    monkeypatch.setattr(Generation, "choose", leaking)
    with working(engine) as client:
        client.generate(1, seed=13)
        with pytest.raises(AssertionError, match="the worker has ended"):
            client.end_of(1)
    assert isinstance(client.fault, AssertionError) and "references" in str(client.fault)


def test_what_is_no_requests_fault_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    def forward(batch: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine._runner, "forward", forward)
    with working(engine) as client:
        client.generate(1)
        with pytest.raises(AssertionError, match="the worker has ended"):
            client.end_of(1)
    assert isinstance(client.fault, RuntimeError)


def test_only_faults_are_failures() -> None:
    for error in (ValueError("x"), PanicException("x"), AssertionError("x")):
        failure = failure_of(error, "a request")
        assert isinstance(failure, InternalError) and "x" not in str(failure).split("(")[0]
    known = InvalidRequestError("top_k: no")
    assert failure_of(known, "a request") is known
    for end in (KeyboardInterrupt(), SystemExit(1)):
        with pytest.raises(type(end)):
            failure_of(end, "a request")
