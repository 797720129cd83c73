"""Consistency of traces: do stages add up, and do they agree with recordings of the caller?

    python -m bench.voice.turn_accounting ../shared/data/speech [--turns 200] [--callers 16]

A server process with its real sessions, voice detection, transport and traces; recogniser, engine
and voice are fakes with random delays, because sixteen real ones are more than two cores can run.
Callers speak recordings in real time. Both sides find the end of the voice independently and share
only the socket. Some answers fail, some hang, some callers hang up in the middle. The exit status
is 1 if a record is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np

from app.clients.talk import CallerAudio, TalkError, load_caller_audio, open_talk
from app.clock import MonotonicClock
from app.observe.loop_lag import LoopLag
from app.observe.store import TraceStore
from app.observe.trace import PATH_INSTANTS
from app.observe.writer import TraceWriter
from app.server.lifecycle import create_app, listening
from audio.asr.recognizer import Transcript
from audio.frame import Samples
from audio.vad import VadModel
from bench.harness.results import Result, add_json_option, report
from llm_core import ChatMessage, EngineDiedError, GenerationEvent, SamplingParams
from tests.support.fakes import PacedEngine, ScriptedRecognizer, ToneSynthesizer, fake_services

MAX_SPEECH_S = 5.0
REPLY = "It is rather mild there. And that is all I know of it."
LIMIT_MS = 20.0
FAILS, HANGS, HANGS_UP = 0.03, 0.01, 0.06


class Recogniser(ScriptedRecognizer):
    """Returns the same question after a random delay."""

    def transcribe(self, samples: Samples, **options: Any) -> Transcript:
        time.sleep(random.choice((0.02, 0.1, 0.3)))
        self.texts = ["How is the weather there?"]
        return super().transcribe(samples, **options)


class Voice(ToneSynthesizer):
    """Adds a random delay."""

    def synthesize(self, text: str, *, speed: float = 1.0) -> Samples:
        time.sleep(random.choice((0.02, 0.1)))
        return super().synthesize(text, speed=speed)


class Model(PacedEngine):
    """Answers after random delays; sometimes fails or hangs."""

    async def generate(
        self, messages: Sequence[ChatMessage], params: SamplingParams, **options: Any
    ) -> AsyncGenerator[GenerationEvent, None]:
        self.queue_s, self.prefill_s = random.choice((0.0, 0.05)), random.choice((0.02, 0.2))
        what = random.random()
        if not params.continue_last and what < FAILS:
            raise EngineDiedError("the engine process ended")
        if not params.continue_last and what < FAILS + HANGS:
            await asyncio.sleep(60)
        async for event in super().generate(messages, params, **options):
            yield event


async def serve() -> None:
    """Print the URL, and serve until standard input is closed."""
    workers = ThreadPoolExecutor(32)
    model = Model(MonotonicClock(), REPLY)  # type: ignore[arg-type]
    services = fake_services(
        model,
        Recogniser(),
        Voice(),
        workers=workers,
        port=0,
        max_sessions=64,
        max_sessions_per_minute=10_000,
        turn_timeout_s=4,
        # With semantic detection the silence in a recording may lie inside a turn.
        turn_detection="server_vad",
    )
    object.__setattr__(services, "vad", VadModel())
    traces = TraceWriter(TraceStore.in_memory(10_000))
    object.__setattr__(services, "traces", traces)
    traces.start()
    measuring = asyncio.create_task(services.loop_lag.run())
    async with listening(create_app(services.settings, services), services.settings) as url:
        print(url, flush=True)
        await asyncio.to_thread(sys.stdin.read)
    measuring.cancel()
    await asyncio.to_thread(traces.close)
    workers.shutdown(cancel_futures=True)


@dataclass
class Found:
    """Differences between recordings and traces, in milliseconds."""

    differences_ms: dict[str, list[float]] = field(default_factory=dict)  # by recording
    beyond: list[dict[str, Any]] = field(default_factory=list)  # above LIMIT_MS, with loop lag
    num_hung_up: int = 0
    problems: Counter[str] = field(default_factory=Counter)


async def caller(
    url: str, said: list[CallerAudio], rng: random.Random, found: Found, lag: LoopLag
) -> None:
    """Make calls of a few utterances each until cancelled."""
    while True:
        try:
            async with open_talk(url) as client:
                for _ in range(rng.randint(2, 5)):
                    audio = rng.choice(said)
                    if rng.random() < HANGS_UP:
                        wait_s = audio.duration_s + rng.uniform(0.2, 1.5)
                        found.num_hung_up += 1
                        await asyncio.wait_for(client.speak(audio, timeout_s=9), wait_s)
                        continue
                    begun_ns = time.monotonic_ns()
                    result = await client.speak(audio, timeout_s=9)
                    for turn, gap_ms in zip(result.turns, result.gaps_ms, strict=True):
                        trace = turn.trace or {}
                        whole_ms = trace.get("voice_to_voice_ms")
                        if gap_ms is None or whole_ms is None:
                            continue
                        off_ms = gap_ms - whole_ms
                        found.differences_ms.setdefault(audio.path.stem, []).append(off_ms)
                        if abs(off_ms) > LIMIT_MS:
                            case = {
                                "recording": audio.path.stem,
                                "difference_ms": round(off_ms),
                                "client_loop_lag_ms": lag.percentile_ms(100, begun_ns),
                                "server_loop_lag_ms": trace["facts"].get("loop_lag_max_ms"),
                                "turns_in_recording": len(result.turns),
                            }
                            found.beyond.append(case)
        except TimeoutError:
            pass  # hung up
        except TalkError as error:
            found.problems[error.code] += 1


def defects(turn: dict[str, Any]) -> list[str]:
    """Defects of one trace."""
    wrong = []
    instants, stages = turn["instants_ms"], turn["stages_ms"]
    known = [name in instants for name in PATH_INSTANTS]
    if known != sorted(known, reverse=True):
        wrong.append("an instant is missing")
    if "ended" not in instants or "speech_end" not in instants:
        wrong.append("no start or no end")
    if any(ms < 0 for ms in (*instants.values(), *stages.values())):
        wrong.append("negative")
    if turn["outcome"] in ("answered", "incomplete") and not all(known):
        wrong.append("answered without all instants")
    whole_ms = turn["voice_to_voice_ms"]
    # Both are sums of integer microseconds.
    if whole_ms is not None and round(sum(stages.values()) * 1000) != round(whole_ms * 1000):
        wrong.append("stages do not add up")
    return wrong


def recordings(folder: Path) -> list[CallerAudio]:
    """The short recordings of ``folder``."""
    vad = VadModel()
    said = [load_caller_audio(path, vad) for path in sorted(folder.glob("*.flac"))]
    return [audio for audio in said if audio.duration_s <= MAX_SPEECH_S]


async def measure(said: list[CallerAudio], num_turns: int, num_callers: int) -> Result:
    """Run callers until there are traces of ``num_turns`` turns."""
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.voice.turn_accounting", "--serve"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert server.stdin is not None and server.stdout is not None
    url = (await server.stdout.readline()).decode().strip()
    found = Found()
    lag = LoopLag()
    callers = [
        asyncio.create_task(caller(url, said, random.Random(number), found, lag))
        for number in range(num_callers)
    ]
    callers.append(asyncio.create_task(lag.run()))
    turns: list[dict[str, Any]] = []
    begun_s = time.monotonic()
    async with httpx.AsyncClient(base_url=url) as client:
        while len(turns) < num_turns:
            await asyncio.sleep(2)
            for task in callers:
                if task.done():
                    task.result()
            turns = (await client.get("/v1/traces?limit=1000")).json()["data"]
    took_s = time.monotonic() - begun_s
    for task in callers:
        task.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    server.stdin.close()
    await server.wait()
    return summary(turns, found, took_s)


def summary(turns: list[dict[str, Any]], found: Found, took_s: float) -> Result:
    """Counts of records and of differences; single cases are details of the result."""
    differences_ms = [ms for several in found.differences_ms.values() for ms in several]
    off = np.abs(differences_ms)
    wrong = Counter(defect for turn in turns for defect in defects(turn))
    result = Result(
        ("measure", "value"),
        details={
            "defects": dict(wrong),
            "outcomes": dict(Counter(turn["outcome"] for turn in turns)),
            "client_errors": dict(found.problems),
            "median_difference_ms": {
                name: round(median(several), 1)
                for name, several in sorted(found.differences_ms.items())
            },
            "beyond_the_limit": found.beyond,
        },
    )
    result.add("turns", len(turns))
    result.add("seconds", round(took_s, 1))
    result.add("records with a defect", sum(bool(defects(turn)) for turn in turns))
    result.add("calls that the caller ended early", found.num_hung_up)
    result.add("turns compared with a recording", len(off))
    result.add(f"of them within {LIMIT_MS:g} ms", int((off <= LIMIT_MS).sum()))
    result.add("median difference, ms", round(median(differences_ms), 1))
    result.add("95th percentile of the absolute difference, ms", round(np.percentile(off, 95), 1))
    result.add("largest absolute difference, ms", round(float(off.max()), 1))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("../shared/data/speech"))
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    add_json_option(parser)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
        return
    said = recordings(options.folder)
    result = asyncio.run(measure(said, options.turns, options.callers))
    report(result, options)
    print(json.dumps(result.details, indent=1))
    sys.exit(bool(result.details["defects"]))


if __name__ == "__main__":
    main()
