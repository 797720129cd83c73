"""The quality gate: its arithmetic, its verdict, its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from app.cli.main import cli
from app.config import load_settings
from app.errors import ConfigError, ParleyError
from bench import gate
from bench.gate import Check, GateResult, Limits, Side
from bench.harness import machine
from bench.harness.rounds import Rounds
from bench.voice.script import SCRIPT
from llm_core import EngineConfig
from tests.support.fakes import ScriptedEngine

LIMITS = Limits()


def figures(decode: float = 100.0, ttft: float = 50.0) -> dict[str, float]:
    return {
        "decode_tok_s": decode,
        "prefill_tok_s": 900.0,
        "ttft_cached_ms": ttft,
        "streams4_tok_s": 300.0,
    }


def test_speed_is_the_median_of_the_rounds_own_ratios() -> None:
    # The machine was twice as slow in the second round, for both: that is nobody's fault.
    old = [figures(100, 50), figures(50, 100), figures(100, 50)]
    new = [figures(120, 40), figures(60, 80), figures(10, 500)]
    decode, prefill, ttft, streams = gate.speed_checks(Rounds({"old": old, "new": new}), LIMITS)
    assert decode.value == pytest.approx(1.2) and decode.passed
    assert ttft.value == pytest.approx(1.25) and ttft.passed, "fewer milliseconds are faster"
    assert prefill.value == streams.value == 1.0
    worse = Rounds({"old": [figures(100, 50)] * 3, "new": [figures(94, 53)] * 3})
    slow = gate.speed_checks(worse, Limits(min_speed=0.95))
    assert [check.passed for check in slow] == [False, True, False, True]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (["a b c d"], ["a b c d"], 1.0),
        (["a b c d"], ["a b x d"], 0.5),
        (["a b"], ["a b c d"], 0.5),
        (["", "a"], ["", "b"], 0.5),
        (["a  b"], ["a b"], 1.0),
    ],
)
def test_agreement_is_what_comes_before_the_first_difference(
    old: list[str], new: list[str], expected: float
) -> None:
    assert gate.agreement(old, new) == expected
    assert gate.agreement_check(old, new, LIMITS).passed is (expected >= 0.9)


def test_perplexity_may_rise_a_little() -> None:
    assert gate.perplexity_check(10.0, 10.05, LIMITS).passed
    assert gate.perplexity_check(10.0, 9.0, LIMITS).passed
    assert not gate.perplexity_check(10.0, 10.2, LIMITS).passed


def voice_figures(**changes: Any) -> dict[str, Any]:
    v2v = {"p50": changes.pop("p50", 600.0), "n": changes.pop("n", 8)}
    return {"v2v_ms": v2v, "wer": 0.07, "missed_turns": 0, "failed_replies": 0, **changes}


def test_voice_is_compared_too() -> None:
    def failed(**changes: Any) -> list[str]:
        checks = gate.voice_checks(voice_figures(), voice_figures(**changes), LIMITS)
        return [check.name.split()[0] for check in checks if not check.passed]

    assert failed() == []
    assert failed(p50=650.0, wer=0.085) == []
    assert failed(wer=0.1) == ["word"]
    assert failed(p50=700.0) == ["voice"]
    assert failed(failed_replies=1) == ["turns"]
    with pytest.raises(ParleyError, match="nothing to compare"):
        gate.voice_checks(voice_figures(), voice_figures(n=0), LIMITS)


def test_a_server_takes_what_has_a_setting() -> None:
    side = Side("package:x", {"kv_dtype": "int8", "num_threads": "2"})
    assert gate.server_settings(side) == {
        "PARLEY_LLM_MODEL": "package:x",
        "PARLEY_LLM_KV_DTYPE": "int8",
        "PARLEY_LLM_THREADS": "2",
    }
    with pytest.raises(ConfigError, match="'max_waiting' is no setting of a whole server"):
        gate.server_settings(Side("x", {"max_waiting": "3"}))


@pytest.mark.parametrize(("value", "status"), [(1.0, 0), (0.5, 1)])
def test_the_exit_status_is_the_verdict(
    monkeypatch: pytest.MonkeyPatch, value: float, status: int
) -> None:
    async def measured(old: Side, new: Side, *args: Any, **options: Any) -> GateResult:
        assert (old.options, new.options) == ({}, {"kv_dtype": "int8"})
        check = Check("agreement of answers", 1.0, value, value, 0.9, value >= 0.9)
        return GateResult({}, {"old": {"model": "a"}, "new": {"model": "b"}}, [check])

    monkeypatch.setattr(gate, "run", measured)
    arguments = ["bench", "gate", "package:a", "package:a,kv_dtype=int8"]
    told = CliRunner().invoke(cli, [*arguments, "--json"])
    assert told.exit_code == status
    found = json.loads(told.stdout)
    assert found["passed"] is (status == 0)
    assert len(found["reasons"]) == status
    shown = CliRunner().invoke(cli, arguments)
    assert shown.exit_code == status
    assert ("beyond the limit of 0.9" in shown.stdout) is (status == 1)


class Scripted(ScriptedEngine):
    """Says as many words as it is asked for, each its own name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} " * 200)
        self.info = msgspec.structs.replace(ScriptedEngine.info, content_hash=name)
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(("new", "passes"), [("a", True), ("b", False)])
async def test_two_engines_are_run_and_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, new: str, passes: bool
) -> None:
    started: list[Scripted] = []
    read: list[str] = []

    class Starter:
        @staticmethod
        async def start(config: EngineConfig) -> Scripted:
            started.append(Scripted(Path(config.model_path).stem))
            return started[-1]

    def perplexity(path: Path, text: str, num_threads: int) -> float:
        read.append(text)
        return 9.0

    monkeypatch.setattr(machine, "read_gb_s", lambda num_threads: 30.0)  # takes a second
    monkeypatch.setattr(gate, "EngineClient", Starter)
    monkeypatch.setattr(gate, "_perplexity", perplexity)
    for name in "ab":
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    result = await gate.run(
        Side(str(tmp_path / "a.gguf")),
        Side(str(tmp_path / f"{new}.gguf"), {"kv_dtype": "int8"}),
        load_settings(home=tmp_path),
        Limits(min_speed=0.0),
        num_rounds=1,
    )
    failed = [check.name for check in result.checks if not check.passed]
    assert failed == ([] if passes else ["agreement of answers"])
    assert result.models["new"]["options"] == {"kv_dtype": "int8"}
    # The old engine's answers are the text; the same weights are not read at all.
    assert len(read) == (0 if passes else 2)
    for text in read:
        assert set(text.split()) == {"a"} and len(text.split()) == 40 * len(SCRIPT)
    assert all(engine.is_closed for engine in started)
    assert len(json.loads(json.dumps(result.to_dict()))["checks"]) == (5 if passes else 6)
