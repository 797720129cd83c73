"""The latency budget: what is left, who overspent, and what the policies win back when one did."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config import DEFAULT_STAGES_MS, Settings, load_settings
from app.conversation.response.budget import BudgetedChunker, BudgetTargets, TurnBudget
from app.conversation.session_config import SessionConfig
from app.conversation.speech.filler import Filler
from app.errors import ConfigError
from app.observe.trace import STAGE_NAMES, TurnTrace
from audio.text.clauses import ClauseChunker
from llm_core import EngineBusyError, EngineDiedError
from tests.support.budget_faults import TEXT, check_words, misses, small_engine, turns, waits_ms
from tests.support.fakes import ManualClock, PacedEngine, recent
from tests.support.session_call import call

MS = 1_000_000
START_NS = 1000 * MS


def budget_of(
    *policies: Any, spoken: bool = True, total_ms: float = 1000.0, **marks_ms: int
) -> TurnBudget:
    trace = TurnTrace("turn_1", "sess_1", spoken=spoken)
    for name, ms in marks_ms.items():
        trace.mark(name, START_NS + ms * MS)
    return TurnBudget(BudgetTargets(total_ms, DEFAULT_STAGES_MS), frozenset(policies), trace)


def at(ms: float) -> int:
    return START_NS + int(ms * MS)


# --- settings ---


def test_the_stages_fit_into_the_whole() -> None:
    assert sum(DEFAULT_STAGES_MS.values()) == Settings().budget_ms
    assert tuple(DEFAULT_STAGES_MS) == STAGE_NAMES


def test_settings_name_single_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARLEY_BUDGET_MS", "800")
    monkeypatch.setenv("PARLEY_BUDGET_STAGES_MS", "asr=150, tts=200.5")
    monkeypatch.setenv("PARLEY_BUDGET_POLICIES", "filler,short_first_clause")
    settings = load_settings()
    assert settings.budget_ms == 800
    assert settings.budget_stages_ms == {**DEFAULT_STAGES_MS, "asr": 150.0, "tts": 200.5}
    assert settings.budget_policies == ("filler", "short_first_clause")
    monkeypatch.setenv("PARLEY_BUDGET_POLICIES", "")
    assert load_settings().budget_policies == ()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("BUDGET_STAGES_MS", "lunch=5", "no stage 'lunch'"),
        ("BUDGET_STAGES_MS", "asr=-5", "greater than or equal to 0"),
        ("BUDGET_STAGES_MS", "asr", "valid number"),
        ("BUDGET_MS", "0", "greater than or equal to 50"),
        ("BUDGET_POLICIES", "panic", "short_first_clause"),
    ],
)
def test_wrong_settings_are_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(f"PARLEY_{name}", value)
    with pytest.raises(ConfigError, match=f"PARLEY_{name}.*{says}"):
        load_settings()


def test_a_session_may_have_its_own() -> None:
    config = SessionConfig("Be brief.", budget_ms=500)
    assert BudgetTargets.of(Settings(), config).total_ms == 500
    assert BudgetTargets.of(Settings(), SessionConfig("")).total_ms == 1000


# --- arithmetic ---


def test_what_is_left_and_who_overspent() -> None:
    budget = budget_of(speech_end=0, endpoint=560, asr_final=1060, llm_scheduled=1062)
    assert budget.deadline_ns == at(1000)
    assert budget.remaining_ms(at(400)) == 600
    assert budget.remaining_ms(at(1500)) == -500
    # The first clause, its sound and the sending have 280 ms: 720 are for what comes before.
    assert budget.overspent_ms("prefill", at(720)) == 0
    assert budget.overspent_ms("prefill", at(1020)) == 300
    assert budget.worst_stage(at(1100)) == "asr"


def test_a_smaller_whole_leaves_less_to_the_first_stages() -> None:
    assert budget_of(speech_end=0, total_ms=500).overspent_ms("prefill", at(320)) == 100
    assert budget_of(speech_end=0, total_ms=2000).overspent_ms("prefill", at(1720)) == 0


@pytest.mark.parametrize("budget", [budget_of(), budget_of(spoken=False, speech_end=0)])
def test_what_has_not_begun_or_was_typed_is_never_late(budget: TurnBudget) -> None:
    assert budget.remaining_ms(at(9999)) is None
    assert budget.overspent_ms("send", at(9999)) == 0
    assert budget.bridge_wait_s(at(9999)) is None


# --- the shorter first clause ---


def chunks(text: str, sizes: list[int]) -> list[str]:
    found, start = [], 0
    for size in sizes:
        found.append(text[start : start + size])
        start += size
    return [*found, text[start:]]


@given(
    st.lists(st.integers(0, 12), max_size=12),
    st.integers(0, 12),
    st.booleans(),
)
def test_nothing_is_lost_or_said_twice(sizes: list[int], late_at: int, is_on: bool) -> None:
    budget = budget_of(*(["short_first_clause"] if is_on else []), speech_end=0)
    chunker = BudgetedChunker(budget)
    clauses = []
    for number, chunk in enumerate(chunks(TEXT, sizes)):
        clauses += chunker.feed(chunk, at(2000 if number >= late_at else 100))
    clauses += chunker.flush(at(3000))
    assert "".join(clauses) == TEXT
    if not is_on:
        usual = ClauseChunker()
        assert clauses == [*usual.feed(TEXT), *usual.flush()]
    for action in budget._trace.actions:
        assert action.saved_ms is not None and action.saved_ms >= 0


def first_clause(budget: TurnBudget, now_ms: float) -> str:
    chunker = BudgetedChunker(budget)
    for word in TEXT.split(" "):
        if clauses := chunker.feed(f"{word} ", at(now_ms)):
            return clauses[0]
    raise AssertionError("no clause")


def test_only_a_late_turn_gets_a_shorter_first_clause() -> None:
    usual = first_clause(budget_of("short_first_clause", speech_end=0), 700)
    late = first_clause(budget_of("short_first_clause", speech_end=0), 1300)
    off = first_clause(budget_of(speech_end=0), 1300)
    assert usual == off
    assert len(late.split()) < len(usual.split())


# --- whole turns under an injected fault ---


async def test_a_turn_in_time_is_left_alone() -> None:
    plain = await turns("none", budget_ms=1200)
    watched = await turns("none", "short_first_clause", "filler", budget_ms=1200)
    assert misses(plain) == misses(watched) == 0
    assert all(turn["budget"]["actions"] == [] for turn in watched)
    assert waits_ms(watched) == waits_ms(plain)


@pytest.mark.parametrize("fault", ["asr", "engine", "tts"])
async def test_a_filler_keeps_the_budget_whatever_is_slow(fault: str) -> None:
    off, on = await turns(fault, budget_ms=1200), await turns(fault, "filler", budget_ms=1200)
    assert misses(off) == 5 and misses(on) == 0
    for before, after in zip(off, on, strict=True):
        (action,) = after["budget"]["actions"]
        assert action["policy"] == "filler"
        saved_ms = before["voice_to_voice_ms"] - after["voice_to_voice_ms"]
        # The trace says what it saved; the same turns without it say that this is true.
        assert action["saved_ms"] == pytest.approx(saved_ms, abs=25)
        assert saved_ms > 100
        assert after["reply"].startswith("Let me see. ")


async def test_a_late_transcript_is_blamed_and_the_first_clause_gets_shorter() -> None:
    off, on = await turns("asr"), await turns("asr", "short_first_clause")
    for before, after in zip(off, on, strict=True):
        (action,) = after["budget"]["actions"]
        assert (action["policy"], action["stage"]) == ("short_first_clause", "asr")
        assert 0 < action["saved_ms"] < 200
        decode_ms = before["stages_ms"]["decode"] - after["stages_ms"]["decode"]
        assert action["saved_ms"] == pytest.approx(decode_ms, abs=1)
        # The voice has less to do as well, so the caller gains more than the cut alone.
        assert before["voice_to_voice_ms"] - after["voice_to_voice_ms"] >= decode_ms
    assert "asr" in off[0]["budget"]["misses_ms"]


async def test_with_a_slow_voice_a_shorter_first_clause_saves_most() -> None:
    # The whole is smaller, so that the turn is late before the voice begins.
    off = await turns("tts", budget_ms=600)
    on = await turns("tts", "short_first_clause", budget_ms=600)
    gained_ms = [b - a for b, a in zip(waits_ms(off), waits_ms(on), strict=True)]
    assert min(gained_ms) > 300
    assert off[0]["budget"]["misses_ms"]["tts"] > 300


async def test_a_timed_out_turn_is_told_even_behind_a_filler() -> None:
    engine = PacedEngine(ManualClock(), TEXT)
    settings = {"budget_policies": ("filler",)}
    async with call(engine, "How is it?", settings=settings) as c:
        object.__setattr__(c.services, "filler", Filler("Let me see.", c.synthesizer))  # type: ignore[arg-type]
        engine.gate.clear()
        await c.ask()
        await c.clock.advance(60)
        (turn,) = recent(c.services.traces.store, 10)
        assert turn["outcome"] == "timed_out"
        assert turn["budget"]["actions"][0]["saved_ms"] is None


# --- a smaller model for the turns that are late ---


async def test_a_smaller_model_answers_when_the_first_one_is_busy() -> None:
    off = await turns("engine", budget_ms=1200)
    on = await turns("engine", "smaller_model", budget_ms=1200)
    assert misses(off) == 5 and misses(on) == 0
    for before, after in zip(off, on, strict=True):
        (action,) = after["budget"]["actions"]
        assert (action["policy"], action["stage"]) == ("smaller_model", "queue")
        saved_ms = before["stages_ms"]["queue"] - after["stages_ms"]["queue"]
        assert action["saved_ms"] == pytest.approx(saved_ms, abs=60)  # its own reading is in there
        assert before["voice_to_voice_ms"] - after["voice_to_voice_ms"] > 300
        assert (before["facts"]["model"], after["facts"]["model"]) == ("scripted", "small")


async def test_a_first_model_in_time_gives_the_answer() -> None:
    for turn in await turns("none", "smaller_model", budget_ms=1200):
        assert turn["facts"]["model"] == "scripted" and turn["budget"]["actions"] == []


async def hurried(break_it: Any, *, budget_ms: int = 1000) -> dict[str, Any]:
    """The record of a turn with an engine that does nothing for a second."""
    engine = PacedEngine(ManualClock(), TEXT)
    engine.queue_s = 1.0
    settings = {"budget_policies": ("smaller_model",), "budget_ms": budget_ms}
    async with call(engine, "How is it?", settings=settings) as c:
        small = small_engine(engine.clock)
        object.__setattr__(c.services, "small_engine", small)
        break_it(engine, small)
        await c.ask()
        await c.clock.advance(40)
        check_words(c)
        assert small.num_running == 0
        (turn,) = recent(c.services.traces.store, 10)
        return turn


def small_is_full(engine: PacedEngine, small: PacedEngine) -> None:
    small.error = EngineBusyError("full")


def small_is_slower(engine: PacedEngine, small: PacedEngine) -> None:
    small.queue_s = 5.0


def first_dies(engine: PacedEngine, small: PacedEngine) -> None:
    engine.error = EngineDiedError("gone")


def both_die(engine: PacedEngine, small: PacedEngine) -> None:
    engine.error = small.error = EngineDiedError("gone")


@pytest.mark.parametrize(
    ("break_it", "outcome", "model"),
    [
        (small_is_full, "answered", "scripted"),
        (small_is_slower, "answered", "scripted"),
        (first_dies, "answered", "small"),
        (both_die, "failed", "scripted"),
    ],
)
async def test_two_engines_fail_no_turn_that_one_can_answer(
    break_it: Any, outcome: str, model: str
) -> None:
    turn = await hurried(break_it)
    assert (turn["outcome"], turn["facts"]["model"]) == (outcome, model)
    assert [a["policy"] for a in turn["budget"]["actions"]] == (
        ["smaller_model"] if model == "small" else []
    )


async def test_without_hurry_the_smaller_model_is_not_asked() -> None:
    turn = await hurried(lambda engine, small: None, budget_ms=5000)
    assert turn["facts"]["model"] == "scripted"
