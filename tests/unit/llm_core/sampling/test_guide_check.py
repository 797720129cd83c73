"""Guides are tried out in processes that are killed when they take too much."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from llm_core.errors import EngineBusyError, InternalError, InvalidRequestError
from llm_core.messages import ChoiceGuide, Guide, JsonGuide, RegexGuide, ToolGuide, ToolSpec
from llm_core.structured import checker_process
from llm_core.structured.checker import GuideChecker
from llm_core.structured.checker_process import Checked, Setup, check
from llm_core.structured.constraint import GuideCompiler
from llm_core.structured.grammar import grammar_of
from tests.support.tiny_model import tiny_tokenizer

COMPILER = GuideCompiler(tiny_tokenizer(), "hermes")
LIBRARY = COMPILER.vocabulary.to_library_alone()
SETUP = Setup(COMPILER.vocabulary, "hermes")
LOG = ("--log-level", "ERROR", "--log-format", "text")

# Each is followed easily; of a number that is a multiple of both, millions of remainders are tried.
HANGS = JsonGuide(
    schema=json.dumps({"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967)]})
)
TOOL = ToolGuide(tools=(ToolSpec(name="f", parameters='{"type": "object"}'),))


def trial(guide: Guide) -> Checked:
    return check(guide, LIBRARY, "hermes")


@pytest.mark.parametrize(
    "guide", [JsonGuide(), RegexGuide(pattern="a+"), ChoiceGuide(options=("é", "b")), TOOL]
)
def test_what_passes_brings_its_grammar(guide: Guide) -> None:
    checked = trial(guide)
    assert checked.grammar == grammar_of(guide, "hermes").text
    assert not checked.error and checked.num_bytes >= 0


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (JsonGuide(schema='{"multipleOf": 2147483648}'), "schema: multipleOf: must be at most"),
        (JsonGuide(schema='{"type": "x"}'), "schema: "),
        (JsonGuide(schema='{"allOf": [{"type": "string"}, {"type": "null"}]}'), "schema: "),
        (RegexGuide(pattern="("), "regex: "),
        (ToolGuide(tools=(ToolSpec(name="f", parameters="{"),)), "tools: f: parameters"),
    ],
)
def test_what_does_not_pass_has_its_reason(guide: Guide, message: str) -> None:
    checked = trial(guide)
    assert checked.error.startswith(message) and not checked.grammar


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_process, "CPU_LIMIT_S", 0.2)


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The schema that was found to have no end at all, past the check that knows of it."""
    monkeypatch.setattr("llm_core.structured.grammar.MAX_MULTIPLE_OF", 2**40)
    return {"type": "integer", "multipleOf": 2**31}


@pytest.mark.usefixtures("short_limits")
def test_what_compiles_for_ever_is_ended(endless: dict[str, Any]) -> None:
    assert trial(HANGS).error == "schema: compiling it takes more than 0.2 s"
    whole = JsonGuide(schema=json.dumps(endless))
    assert trial(whole).error == "schema: compiling it takes more than 0.2 s"
    nested = json.dumps({"type": "object", "properties": {"n": endless}})
    tools = ToolGuide(tools=(ToolSpec(name="f", parameters=nested),))
    assert trial(tools).error == "tools: compiling it takes more than 0.2 s"
    assert not trial(JsonGuide()).error


def test_memory_has_a_limit(endless: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_process, "MEMORY_LIMIT_BYTES", 16 << 20)
    monkeypatch.setattr(checker_process, "CPU_LIMIT_S", 60.0)
    monkeypatch.setattr(checker_process, "WALL_LIMIT_S", 60.0)
    error = trial(JsonGuide(schema=json.dumps(endless))).error
    assert error == "schema: compiling it takes more than 16 MB"


def test_a_crash_is_the_guides_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        checker_process, "compile_grammar", lambda *_: os.kill(os.getpid(), signal.SIGSEGV)
    )
    assert trial(JsonGuide()).error == "schema: compiling it fails (SIGSEGV)"

    def panic(*_: object) -> None:
        raise type("PanicException", (BaseException,), {})("index out of bounds")

    monkeypatch.setattr(checker_process, "compile_grammar", panic)
    assert "PanicException: index out of bounds" in trial(JsonGuide()).error


def test_no_time_on_a_busy_machine_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_process, "WALL_LIMIT_S", 0.05)
    monkeypatch.setattr(checker_process, "CPU_LIMIT_S", 60.0)
    assert trial(HANGS) == Checked(is_late=True)


def test_no_trial_is_left_behind() -> None:
    trial(JsonGuide())
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.fixture
def checker() -> Iterator[GuideChecker]:
    made = GuideChecker(SETUP, LOG)
    yield made
    made.close()


def pid_of(checker: GuideChecker) -> int:
    assert checker._process is not None
    return checker._process.pid


def test_the_process_answers_one_after_another(checker: GuideChecker) -> None:
    grammar, num_bytes = checker.check(TOOL)
    assert grammar == grammar_of(TOOL, "hermes") and num_bytes >= 0
    pid = pid_of(checker)
    with pytest.raises((InvalidRequestError, EngineBusyError), match="^schema: "):
        checker.check(HANGS)
    checker.check(JsonGuide())
    assert pid_of(checker) == pid
    assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_gone_or_stopped_is_replaced(
    checker: GuideChecker, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker.check(JsonGuide())
    old_pid = pid_of(checker)
    assert checker._connection is not None
    checker._connection.settimeout(0.2)
    os.kill(old_pid, number)
    checker.check(JsonGuide())
    assert pid_of(checker) != old_pid


def test_a_process_that_cannot_run_is_said_so(
    checker: GuideChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "llm_core.structured.checker.module_command", lambda *_: ["/nowhere/python"]
    )
    with pytest.raises(InternalError, match="guides cannot be checked"):
        checker.check(JsonGuide())


def test_a_trial_without_time_is_to_be_tried_again(
    checker: GuideChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker, "_ask", lambda guide: Checked(is_late=True))
    with pytest.raises(EngineBusyError, match="^schema: .*try again later"):
        checker.check(JsonGuide())


def test_a_closed_checker_leaves_no_process(checker: GuideChecker) -> None:
    checker.check(JsonGuide())
    pid = pid_of(checker)
    checker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
