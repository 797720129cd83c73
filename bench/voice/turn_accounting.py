"""Hundreds of turns over real sockets: do traces add up, and do they say what a recording shows?

``python -m bench.voice.turn_accounting ../shared/data/speech --turns 200 --callers 16``

A server in a process of its own, with its real sessions, voice detection, transport and traces;
recogniser, model and voice are stand-ins that take random times, for what they do is not in
question here and sixteen callers of the real ones are more than two cores hold. Callers speak
recordings at the pace of a mouth; the two sides share nothing but the socket, and each finds the
end of the voice by itself. Some answers fail, some hang, some callers hang up in the middle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
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
from llm_core import ChatMessage, EngineDiedError, GenerationEvent, SamplingParams
from tests.support.fakes import PacedEngine, ScriptedRecognizer, ToneSynthesizer, fake_services

MAX_SPEECH_S = 5.0
REPLY = "It is rather mild there. And that is all I know of it."
LIMIT_MS = 20.0
FAILS, HANGS, HANGS_UP = 0.03, 0.01, 0.06


class Recogniser(ScriptedRecognizer):
    """Hears a question in everything, after a while."""

    def transcribe(self, samples: Samples, **options: Any) -> Transcript:
        time.sleep(random.choice((0.02, 0.1, 0.3)))
        self.texts = ["How is the weather there?"]
        return super().transcribe(samples, **options)


class Voice(ToneSynthesizer):
    """Takes a while."""

    def synthesize(self, text: str, *, speed: float = 1.0) -> Samples:
        time.sleep(random.choice((0.02, 0.1)))
        return super().synthesize(text, speed=speed)


class Model(PacedEngine):
    """Answers, mostly."""

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
    """Prints the address, and serves until stdin ends."""
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
        # Where a caller goes on in the middle of a turn, recording and trace mean other silences.
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
    """What the callers heard: differences of recording and trace, milliseconds."""

    differences_ms: dict[str, list[float]] = field(default_factory=dict)  # by recording
    beyond: list[dict[str, Any]] = field(default_factory=list)  # with how late both loops were
    num_hung_up: int = 0
    problems: Counter[str] = field(default_factory=Counter)


async def caller(
    url: str, said: list[CallerAudio], rng: random.Random, found: Found, lag: LoopLag
) -> None:
    """Calls again and again, with a few utterances a call, until cancelled."""
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
                                "off_ms": off_ms,
                                "callers_loop_late_ms": lag.percentile_ms(100, begun_ns),
                                "servers_loop_late_ms": trace["facts"].get("loop_lag_max_ms"),
                                "turns_in_recording": len(result.turns),
                            }
                            found.beyond.append(case)
        except TimeoutError:
            pass  # hung up
        except TalkError as error:
            found.problems[error.code] += 1


def faults(turn: dict[str, Any]) -> list[str]:
    """What is wrong with a record."""
    wrong = []
    instants, stages = turn["instants_ms"], turn["stages_ms"]
    known = [name in instants for name in PATH_INSTANTS]
    if known != sorted(known, reverse=True):
        wrong.append("an instant is missing")
    if "ended" not in instants or "speech_end" not in instants:
        wrong.append("no beginning or no end")
    if any(ms < 0 for ms in (*instants.values(), *stages.values())):
        wrong.append("negative")
    if turn["outcome"] in ("answered", "incomplete") and not all(known):
        wrong.append("answered without all instants")
    whole_ms = turn["voice_to_voice_ms"]
    # Both are sums of whole microseconds.
    if whole_ms is not None and round(sum(stages.values()) * 1000) != round(whole_ms * 1000):
        wrong.append("parts do not add up")
    return wrong


def recordings(folder: Path) -> list[CallerAudio]:
    """The short ones."""
    vad = VadModel()
    said = [load_caller_audio(path, vad) for path in sorted(folder.glob("*.flac"))]
    return [audio for audio in said if audio.duration_s <= MAX_SPEECH_S]


async def measure(said: list[CallerAudio], num_turns: int, num_callers: int) -> dict[str, Any]:
    """Calls until so many turns have left a record."""
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
    differences_ms = [ms for several in found.differences_ms.values() for ms in several]
    off = np.abs(differences_ms)
    wrong = Counter(fault for turn in turns for fault in faults(turn))
    return {
        "turns": len(turns),
        "took_s": round(took_s, 1),
        "callers": num_callers,
        "outcomes": dict(Counter(turn["outcome"] for turn in turns)),
        "faulty_records": dict(wrong),
        "compared_with_recording": len(off),
        "within_20_ms": int((off <= LIMIT_MS).sum()),
        "off_ms": {
            "median": round(statistics.median(differences_ms), 1),
            "p95_abs": round(float(np.percentile(off, 95)), 1),
            "max_abs": round(float(off.max()), 1),
        },
        "median_off_ms": {
            name: round(statistics.median(several), 1)
            for name, several in sorted(found.differences_ms.items())
        },
        "beyond_20_ms": [
            {name: round(v) if isinstance(v, float) else v for name, v in case.items()}
            for case in found.beyond
        ],
        "hung_up": found.num_hung_up,
        "client_errors": dict(found.problems),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("../shared/data/speech"))
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
        return
    found = asyncio.run(measure(recordings(options.folder), options.turns, options.callers))
    print(json.dumps(found, indent=1))
    sys.exit(bool(found["faulty_records"]))


if __name__ == "__main__":
    main()
