"""Roll-out of a second engine: who gets it, when it is withdrawn, and that no call is lost."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from app.config import load_settings
from app.conversation.events import ResponseDone
from app.conversation.services import Services
from app.conversation.session import Session
from app.conversation.session_config import SessionConfig
from app.conversation.tools import ToolBox
from app.errors import ConfigError
from app.observe.canary_statistics import CanaryJudge, CanaryRules, verdict_of, worse_by_chance
from app.observe.trace import FACTS
from app.routing.canary_denylist import Withdrawals
from app.routing.canary_router import Rollout, model_id
from app.server.engine_startup import load_engine, load_rollout
from llm_core import (
    ChatMessage,
    EngineBusyError,
    EngineDiedError,
    FirstToken,
    GenerationDone,
    GenerationEvent,
    InvalidRequestError,
    JsonGuide,
    SamplingParams,
    TextDelta,
    content_hash,
)
from tests.support.fake_turns import a_turn
from tests.support.fakes import (
    InlineWriter,
    ManualClock,
    PacedEngine,
    PacedExecutor,
    Recorder,
    ScriptedEngine,
    ScriptedRecognizer,
    fake_services,
    recent,
    settle,
    silence,
    voice,
)
from tests.support.tiny_model import write_tiny_gguf

USER = [ChatMessage("user", "Hello")]
PARAMS = SamplingParams(max_tokens=50)


# --- the statistics ---


def test_the_exact_test_agrees_with_fishers_tea() -> None:
    # Four cups of eight are told right with probability 1/70, three or more with 17/70.
    assert worse_by_chance(4, 0, 4, 4) == pytest.approx(1 / 70)
    assert worse_by_chance(4, 1, 4, 3) == pytest.approx(17 / 70)
    assert worse_by_chance(50, 9, 50, 0) == 1.0
    assert worse_by_chance(10, 10, 10, 10) == pytest.approx(1.0)
    assert worse_by_chance(200, 4, 200, 100) < 1e-25


def run_judge(rng: random.Random, old: float, new: float, num_turns: int) -> tuple[str | None, int]:
    judge, num_new = CanaryJudge(), 0
    for _ in range(num_turns):
        lane: Any = rng.choice(("stable", "canary"))
        num_new += lane == "canary"
        is_late = rng.random() < (new if lane == "canary" else old)
        if reason := judge.add(lane, "late" if is_late else "ok"):
            return reason, num_new
    return None, num_new


def test_a_twin_is_hardly_ever_withdrawn_however_often_one_looks() -> None:
    rng = random.Random(4)
    withdrawn = [run_judge(rng, 0.2, 0.2, 600)[0] is not None for _ in range(150)]
    assert sum(withdrawn) <= 8  # 5% of 150, and it is an upper bound


def test_a_worse_one_is_withdrawn_soon() -> None:
    rng = random.Random(5)
    needed = []
    for _ in range(30):
        reason, num_turns = run_judge(rng, 0.05, 0.6, 600)
        assert reason is not None and "turns late or failed" in reason
        needed.append(num_turns)
    assert max(needed) <= 60


def test_a_small_difference_is_let_pass_and_a_few_turns_prove_nothing() -> None:
    judge = CanaryJudge(CanaryRules(min_difference=0.7))
    for _ in range(150):
        assert judge.add("stable", "ok") is None
        assert judge.add("canary", "late" if _ % 2 else "ok") is None
    judge = CanaryJudge()
    for _ in range(19):
        assert judge.add("stable", "ok") is None
        assert judge.add("canary", "late") is None
    judge = CanaryJudge()
    assert all(judge.add("canary", "late") is None for _ in range(100)), "nothing to compare with"


def test_failures_in_a_row_need_no_statistics() -> None:
    judge = CanaryJudge()
    assert judge.add("canary", "failed") is None
    assert judge.add("canary", "ok") is None
    assert [judge.add("canary", "failed") for _ in range(3)][2] == "3 failures in a row"
    assert [judge.add("stable", "failed") for _ in range(9)] == [None] * 9


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "ok"),
        ({"budget": {"misses_ms": {"total": 5.0}}}, "late"),
        ({"budget": {"misses_ms": {"asr": 5.0}}}, "ok"),
        ({"facts": {"playout_gap_ms": 250.0}}, "late"),
        ({"facts": {"engine_fallback": "engine_died"}}, "failed"),
        ({"facts": {"engine_fallback": "no_answer"}}, "late"),
        ({"outcome": "failed", "reason": "engine_died"}, "failed"),
        ({"outcome": "timed_out", "reason": "timed_out"}, "failed"),
        ({"outcome": "failed", "reason": "synthesis_failed"}, None),
        ({"outcome": "failed", "reason": "context_length_exceeded"}, None),
        ({"outcome": "cancelled"}, None),
        ({"outcome": "interrupted"}, "ok"),
    ],
)
def test_what_a_turn_says_of_its_engine(changes: dict[str, Any], expected: str | None) -> None:
    assert verdict_of(a_turn(**changes)) == expected


# --- the way to an engine ---


class Lane(ScriptedEngine):
    """A scripted engine with a name, that can be closed, and can fall silent."""

    def __init__(self, name: str, *replies: str) -> None:
        super().__init__(*replies)
        self.info = msgspec.structs.replace(
            type(self).info, name=name, content_hash=f"sha256:{name}0123456789abcdef"
        )
        self.num_closed = 0

    async def close(self) -> None:
        self.num_closed += 1


def rollout(stable: Lane, canary: Lane, share: float = 1.0, **options: Any) -> Rollout:
    return Rollout(cast(Any, stable), cast(Any, canary), share, **{"patience_s": 0.05, **options})


async def answer(
    engine: Any, params: SamplingParams = PARAMS, **options: Any
) -> tuple[str, Any, list[Any]]:
    async with await engine.open_reply(USER, params, **options) as reply:
        events: list[GenerationEvent] = [event async for event in reply]
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    return text, reply, events


async def test_a_conversation_stays_where_it_was_given_and_shares_are_kept() -> None:
    plan = rollout(Lane("old"), Lane("new"), 0.25)
    lanes = [plan.lane_of(f"sess_{n}") for n in range(4000)]
    assert lanes == [plan.lane_of(f"sess_{n}") for n in range(4000)]
    assert lanes.count("canary") / 4000 == pytest.approx(0.25, abs=0.03)
    assert {rollout(Lane("o"), Lane("n"), 0.0).lane_of(str(n)) for n in range(50)} == {"stable"}


async def test_the_new_engine_serves_its_share() -> None:
    stable, canary = Lane("old", "Old answer."), Lane("new", "New answer.")
    engine = rollout(stable, canary).engine_for("sess_1")
    text, reply, _ = await answer(engine)
    assert text == "New answer." and engine.info.name == "new"
    assert reply.served == {"engine": "canary", "model": "new@new012345678"}
    assert [e async for e in engine.generate(USER, PARAMS)] != []
    assert stable.requests == [] and len(canary.requests) == 2
    await engine.prefill(USER)
    assert (len(stable.prefills), len(canary.prefills)) == (0, 1)
    assert (await engine.stats()).num_blocks == 64


@pytest.mark.parametrize("error", [EngineDiedError("gone"), EngineBusyError("full")])
async def test_an_error_before_the_first_word_is_not_heard(error: Exception) -> None:
    stable, canary = Lane("old", "Old answer."), Lane("new", "New answer.")
    canary.error = error
    text, reply, _ = await answer(rollout(stable, canary).engine_for("sess_1"))
    assert text == "Old answer."
    assert reply.served["engine_fallback"] == error.code  # type: ignore[attr-defined]
    assert reply.served["model"].startswith("old@")
    assert canary.num_running == stable.num_running == 0


async def test_an_engine_that_gives_no_sign_is_left() -> None:
    class Silent(Lane):
        async def generate(self, *args: Any, **options: Any) -> AsyncGenerator[GenerationEvent]:
            await asyncio.Event().wait()
            raise AssertionError
            yield  # a generator

        async def prefill(self, messages: Sequence[ChatMessage], **options: Any) -> Any:
            await asyncio.Event().wait()

    engine = rollout(Lane("old", "Old answer."), Silent("new")).engine_for("sess_1")
    text, reply, _ = await answer(engine, deadline_ns=1)
    assert (text, reply.fallback) == ("Old answer.", "no_answer")
    # One that was begun in hope may wait, until it is wanted, by a caller or by who has typed.
    for deadline_ns in (1, None):
        async with await engine.open_reply(USER, PARAMS) as held:
            reading = asyncio.ensure_future(anext(held))
            await asyncio.wait([reading], timeout=0.15)
            assert not reading.done() and not held.fallback
            held.set_deadline(deadline_ns)
            assert isinstance(await reading, FirstToken) and held.fallback == "no_answer"
    with pytest.raises(Exception, match="did not read the prompt in time"):
        await engine.prefill(USER)


async def test_an_error_in_the_middle_is_gone_on_with() -> None:
    stable, canary = Lane("old", " three four."), Lane("new", "One two three")
    canary.error, canary.words_before_error = EngineDiedError("gone"), 2
    text, reply, events = await answer(rollout(stable, canary).engine_for("sess_1"))
    assert text == "One two three four."
    assert stable.requests == [[*USER, ChatMessage("assistant", "One two")]]
    (params,) = stable.params
    assert (params.continue_last, params.max_tokens) == (True, 48)
    assert sum(isinstance(event, FirstToken) for event in events) == 1
    counts = [event.num_tokens for event in events if isinstance(event, TextDelta)]
    assert counts == sorted(counts)
    assert isinstance(events[-1], GenerationDone)
    assert events[-1].usage.completion_tokens == counts[-1]


async def test_what_cannot_be_gone_on_with_fails_as_ever() -> None:
    stable, canary = Lane("old", "{}"), Lane("new", '{ "a": 1 }')
    canary.error, canary.words_before_error = EngineDiedError("gone"), 2
    engine = rollout(stable, canary).engine_for("sess_1")
    with pytest.raises(EngineDiedError):
        await answer(engine, SamplingParams(guide=JsonGuide()))
    # And what no engine takes is an error of the request.
    stable.error = canary.error = InvalidRequestError("no")
    canary.words_before_error = 0
    with pytest.raises(InvalidRequestError):
        await answer(engine)
    assert stable.num_running == canary.num_running == 0


async def test_guides_are_made_ready_where_the_conversation_is() -> None:
    stable, canary = Lane("old", "Old answer."), Lane("new", "New answer.")
    plan = rollout(stable, canary)
    engine = plan.engine_for("sess_1")
    await engine.prepare_guide(JsonGuide())
    canary.problem = "it hangs"
    assert engine.problem == "it hangs"
    plan.withdraw("too slow")
    await engine.prepare_guide(JsonGuide(schema="{}"))
    assert (canary.guides, stable.guides) == ([JsonGuide()], [JsonGuide(schema="{}")])
    assert engine.problem == ""


async def test_a_withdrawn_engine_is_closed_when_its_replies_are_over(tmp_path: Path) -> None:
    stable, canary = Lane("old", "Old answer."), Lane("new", "New answer.")
    memory = Withdrawals(tmp_path / "rollout.json")
    plan = rollout(stable, canary, key="sha256:new,kv_dtype=int8", withdrawals=memory)
    engine = plan.engine_for("sess_1")
    async with await engine.open_reply(USER, PARAMS) as reply:
        await anext(reply)
        plan.withdraw("too slow")
        await settle()
        assert engine.lane == "stable" and canary.num_closed == 0
        rest = [event async for event in reply]
        assert isinstance(rest[-1], GenerationDone), "what it has begun it ends"
    await settle()
    assert canary.num_closed == 1
    assert (await answer(engine))[0] == "Old answer."
    await plan.close()
    assert canary.num_closed == 1
    again = Withdrawals(tmp_path / "rollout.json")
    assert again.reason("sha256:new,kv_dtype=int8") == "too slow"
    assert again.reason("sha256:other") is None


def test_a_memory_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rollout.json"
    for text in ("{", "[]", '{"withdrawn": 3}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"rollout\.json"):
            Withdrawals(path)


# --- whole calls ---


class Callers:
    """Callers of one server, one after another, each with a session of its own."""

    def __init__(self, stable: PacedEngine, canary: PacedEngine, **settings: Any) -> None:
        self.clock = stable.clock
        self.executor = PacedExecutor(self.clock)
        recognizer = ScriptedRecognizer(*["How are you?"] * 500)
        base = fake_services(stable, recognizer, workers=self.executor, **settings)
        rules = CanaryRules(min_turns=12)
        self.plan = Rollout(cast(Any, stable), cast(Any, canary), 0.5, rules=rules)
        traces = InlineWriter(
            base.traces.store,
            store_transcripts=True,
            sinks=[base.metrics.observe, self.plan.observe],
        )
        self.services: Services = replace(base, rollout=self.plan, traces=traces)
        self.responses: list[Any] = []

    async def call(self) -> dict[str, Any]:
        out = Recorder()
        session = Session(self.services, SessionConfig("Be brief."), out, self.clock)
        audio = voice(0.3) + silence(0.7)
        for start in range(0, len(audio), 4800):
            await self.clock.advance(0.1)
            await session.append_audio(audio[start : start + 4800], self.clock.now_ns())
        await self.clock.advance(8)
        await session.close()
        (done,) = out.of(ResponseDone)
        self.responses.append(done.response)
        (turn,) = recent(self.services.traces.store, 1)
        assert turn["session_id"] == session.id
        return turn


def paced(clock: ManualClock, name: str) -> PacedEngine:
    engine = PacedEngine(clock, "Yes it is. And more of it.")
    engine.info = msgspec.structs.replace(engine.info, name=name, content_hash="sha256:" + "0" * 64)
    return engine


def closable(engine: PacedEngine) -> list[bool]:
    closed: list[bool] = []

    async def close() -> None:
        closed.append(True)

    cast(Any, engine).close = close
    return closed


async def test_a_slow_canary_is_withdrawn_by_itself_and_no_call_is_lost() -> None:
    clock = ManualClock()
    stable, canary = paced(clock, "old"), paced(clock, "new")
    canary.prefill_s = 1.2  # the slowdown: beyond the budget of a second
    closed = closable(canary)
    callers = Callers(stable, canary)
    turns = []
    while callers.plan.is_running and len(turns) < 120:
        turns.append(await callers.call())
    assert "turns late or failed" in callers.plan.withdrawn_because
    lanes = [turn["facts"]["engine"] for turn in turns]
    assert 12 <= lanes.count("canary") <= 40
    turns += [await callers.call() for _ in range(6)]
    assert {turn["facts"]["engine"] for turn in turns[-6:]} == {"stable"}
    # No call is lost, and those that the slow engine had were answered too.
    assert [response.status for response in callers.responses] == ["completed"] * len(turns)
    assert {turn["outcome"] for turn in turns} == {"answered"}
    late = {turn["facts"]["engine"] for turn in turns if turn["budget"]["misses_ms"].get("total")}
    assert late == {"canary"}
    assert {turn["facts"]["model"] for turn in turns} == {"old@000000000000", "new@000000000000"}
    assert {name for turn in turns for name in turn["facts"]} - FACTS.keys() == set()
    assert closed == [True]
    text = callers.services.metrics.exposition("text/plain")[0].decode()
    counted = f'{{engine="canary",verdict="late"}} {lanes.count("canary")}.0'
    assert f"parley_engine_turns_total{counted}" in text

    await callers.executor.close()


async def test_a_canary_that_dies_costs_no_caller_an_answer() -> None:
    clock = ManualClock()
    stable, canary = paced(clock, "old"), paced(clock, "new")
    closed = closable(canary)
    callers = Callers(stable, canary)
    canary.error = EngineDiedError("the engine process ended")
    canary.words_before_error = 2
    turns = []
    while callers.plan.is_running and len(turns) < 60:
        turns.append(await callers.call())
    assert callers.plan.withdrawn_because == "3 failures in a row"
    assert {turn["outcome"] for turn in turns} == {"answered"}
    fallen = [turn for turn in turns if turn["facts"].get("engine_fallback") == "engine_died"]
    assert len(fallen) == 3 and {t["facts"]["engine"] for t in fallen} == {"canary"}
    await settle()
    assert closed == [True]
    await callers.executor.close()


# --- starting one ---


def test_content_and_not_the_name_is_hashed(tmp_path: Path) -> None:
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    first.write_bytes(b"abc")
    second.write_bytes(b"abc")
    # The test vector of FIPS 180-4.
    assert content_hash(first) == content_hash(second)
    assert content_hash(first).startswith("sha256:ba7816bf8f01cfea414140de5dae2223")
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    before = content_hash(folder)
    (folder / ".cache").write_text("not read by anybody")
    assert content_hash(folder) == before
    (folder / "config.json").rename(folder / "config2.json")
    assert content_hash(folder) != before


async def path_of(name: str) -> Path:
    return Path(name)


async def test_settings_start_a_second_engine_whose_death_is_not_heard(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", context_len=4096)
    settings = load_settings(
        home=tmp_path,
        llm_model=str(path),
        canary="kv_dtype=int8,backend=torch",
        canary_share=0.9,
        canary_patience_ms=60_000,
        canary_sha256=content_hash(path)[:20],
    )
    stable = Lane("old", "and so on to the end.")
    async with AsyncExitStack() as stack:
        plan = await load_rollout(settings, cast(Any, stable), ToolBox(), path_of, stack)
        assert plan is not None and plan.share == 0.9
        assert model_id(plan.canary.info) == f"tiny@{content_hash(path)[7:19]}"
        engine = next(e for n in range(99) if (e := plan.engine_for(str(n))).lane == "canary")
        endless = SamplingParams(max_tokens=600, ignore_eos=True)
        said = 0
        async with await engine.open_reply(USER, endless) as reply:
            async for event in reply:
                said += isinstance(event, TextDelta)
                if said == 20 and not reply.fallback:
                    assert plan.canary._process is not None
                    os.kill(plan.canary._process.pid, signal.SIGKILL)
        assert reply.fallback == "engine_died"
        assert isinstance(event, GenerationDone)
        assert stable.params[0].continue_last and len(stable.requests[0]) == 2
        plan.withdraw("too slow")
    assert not plan.canary.is_alive, "closed with the server"
    known = json.loads((tmp_path / "rollout.json").read_text())["withdrawn"]
    assert list(known) == [f"{content_hash(path)},backend=torch,kv_dtype=int8"]
    async with AsyncExitStack() as stack:
        assert await load_rollout(settings, cast(Any, stable), ToolBox(), path_of, stack) is None
        pinned = load_settings(home=tmp_path, llm_model=str(path), llm_sha256="abc")
        with pytest.raises(ConfigError, match=r"PARLEY_LLM_SHA256 asks for abc, but .* sha256:"):
            await load_engine(pinned, ToolBox(), path_of, stack)
