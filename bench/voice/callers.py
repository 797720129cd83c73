"""`parley bench voice`: simulated callers who speak in real time, and a recording of both sides.

Latency is measured twice, as silence in the recording and by the traces of the server; the
difference of the two is reported, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.clients.call import AudioSocketPort, CallClient, open_call
from app.clients.phone_providers import PEERS
from app.clients.recording import RATE, Played, first_audible
from app.clients.server_process import own_server
from app.clients.talk import NoReplyError, NoSpeechError, TalkClient, TalkResult, open_talk
from app.clients.talk_log import LoggedTurn
from app.config import load_settings
from app.errors import ParleyError
from app.models.store import ModelStore
from audio.tts.synthesizer import Synthesizer
from audio.vad import VadModel
from bench.harness.figures import (
    Answer,
    cpu_seconds,
    percentiles,
    stage_medians,
    waited_for,
    word_errors,
)
from bench.voice.recordings import Recordings
from bench.voice.script import SCRIPT, Kind, Utterance, speak_line

PROVIDERS = tuple(PEERS)
_TIMEOUT_S = 20.0
_STAGGER_S = 0.7  # between the starts of two callers
_STOP_DUE_S = 0.5  # a reply that sounds longer over the caller was not interrupted
_PLAYOUT_GAP_MS = 200.0  # a pause in a reply that a listener notices


@dataclass
class Tally:
    """Figures of all callers together."""

    answers: list[Answer] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    difference_ms: list[float] = field(default_factory=list)
    signed_ms: list[float] = field(default_factory=list)
    barge_in_ms: list[float] = field(default_factory=list)
    num_turns: int = 0
    false_cutoffs: int = 0
    repaired_unheard: int = 0
    repaired_heard: int = 0
    missed_turns: int = 0
    missed_barge_ins: int = 0
    idle_barge_ins: int = 0
    playout_gaps: int = 0
    failed_replies: int = 0
    word_errors: int = 0
    num_words: int = 0
    wasted_tokens: int = 0
    wasted_answers: int = 0
    wasted_transcripts: int = 0

    def count(self, said: Utterance, result: TalkResult) -> None:
        """Count one utterance and the turns that it led to."""
        self.num_turns += said.num_turns
        num_heard = sum(len(turn.heard) for turn in result.turns)
        self.false_cutoffs += max(0, num_heard - said.num_turns)
        # The caller went on, so the server withdrew an answer and merged both parts of the turn.
        withdrawn = [turn for turn in result.turns if turn.is_withdrawn]
        num_audible = sum(first_audible(turn.pieces) is not None for turn in withdrawn)
        self.repaired_heard += num_audible
        self.repaired_unheard += result.num_rejoined - num_audible
        self.missed_turns += max(0, said.num_turns - num_heard)
        if said.text is not None:
            heard = " ".join(turn.transcript for turn in result.turns)
            errors, num_words = word_errors(said.text, heard)
            self.word_errors += errors
            self.num_words += num_words
        self.failed_replies += sum(turn.status == "failed" for turn in result.turns)
        if said.kind is Kind.BARGE_IN:
            self._count_barge_in(said, result)
        for turn, gap in zip(result.turns, result.gaps_ms, strict=True):
            trace = turn.trace or {}
            facts = trace.get("facts") or {}
            self.wasted_tokens += facts.get("wasted_tokens", 0)
            self.wasted_answers += facts.get("wasted_answers", 0)
            self.wasted_transcripts += facts.get("wasted_transcripts", 0)
            self.playout_gaps += (facts.get("playout_gap_ms") or 0.0) > _PLAYOUT_GAP_MS
            if turn.is_withdrawn:
                continue  # no turn ended there
            own = trace.get("voice_to_voice_ms")
            if own is not None:
                self.answers.append(Answer(own, trace.get("stages_ms") or {}))
            if gap is not None:
                self.gap_ms.append(gap)
            if own is not None and gap is not None:
                self.difference_ms.append(abs(own - gap))
                self.signed_ms.append(gap - own)

    def count_missed(self, said: Utterance) -> None:
        """Count one utterance that was not answered."""
        self.num_turns += said.num_turns
        self.missed_turns += said.num_turns

    def _count_barge_in(self, said: Utterance, result: TalkResult) -> None:
        onset = said.audio.voiced.first_after(said.second_from)
        stops = [at for at in result.silenced_at if onset is not None and at >= onset]
        if onset is None:
            raise AssertionError(f"no voice in the second part of {said.text!r}")
        if stops:
            self.barge_in_ms.append((stops[0] - onset) * 1000 / RATE)
        elif _talks_over(said, result, onset):
            self.missed_barge_ins += 1
        else:
            self.idle_barge_ins += 1

    def to_dict(self, callers: int, cpu_s: float | None, wall_s: float) -> dict[str, Any]:
        """The figures, for JSON; ``wer`` is None where no words are known."""
        wer = round(self.word_errors / self.num_words, 4) if self.num_words else None
        per_turn = None if cpu_s is None else round(cpu_s / max(1, self.num_turns), 2)
        return {
            "callers": callers,
            "turns": self.num_turns,
            "wall_s": round(wall_s, 1),
            "v2v_ms": percentiles([answer.v2v_ms for answer in self.answers]),
            "waited_for_ms": waited_for(self.answers),
            "gap_in_recording_ms": percentiles(self.gap_ms)
            | {
                "difference": percentiles(self.difference_ms),
                # Silence in the recording minus the latency in the trace.
                "signed": percentiles(self.signed_ms, (5, 50, 95)),
            },
            "stages_ms": stage_medians(self.answers),
            "barge_in_ms": percentiles(self.barge_in_ms),
            "missed_barge_ins": self.missed_barge_ins,
            # The answer had not started, or had ended: there was nothing to interrupt.
            "idle_barge_ins": self.idle_barge_ins,
            "false_cutoffs": self.false_cutoffs,
            "repaired_cutoffs": {"heard": self.repaired_heard, "unheard": self.repaired_unheard},
            "missed_turns": self.missed_turns,
            "failed_replies": self.failed_replies,
            "playout_gaps": self.playout_gaps,
            "wer": wer,
            "wasted_tokens": self.wasted_tokens,
            "wasted_answers": self.wasted_answers,
            "wasted_transcripts": self.wasted_transcripts,
            "cpu": {"seconds_per_turn": per_turn},
        }


def _talks_over(said: Utterance, result: TalkResult, onset: int) -> bool:
    """True if a reply sounds after the time by which the caller, who speaks from sample ``onset``
    on, should have interrupted it."""
    due = onset + round(_STOP_DUE_S * RATE)
    until = said.audio.voiced.last_before(said.audio.pcm.size) or due
    over = (
        Played(max(due, piece.start), piece.pcm[max(0, due - piece.start) : until - piece.start])
        for piece in result.recording.played
        if piece.start < until
    )
    return first_audible([*over]) is not None


@dataclass(frozen=True, slots=True)
class VoiceOptions:
    """Options of one run.

    ``callers`` at once say ``turns`` utterances each, of the script or of the folder of recordings
    ``speech``. ``provider``: they call by phone, through one of ``PROVIDERS``. Without ``url`` a
    server is started, with the environment variables ``server``; only then is its CPU time known.
    ``audiosocket_port``: of the server at ``url``. ``record``: an existing folder for stereo
    recordings, the caller on the left.
    """

    callers: int = 1
    turns: int = 8
    url: str | None = None
    api_key: str | None = None
    home: Path | None = None
    record: Path | None = None
    provider: str | None = None
    audiosocket_port: int | None = None
    speech: Path | None = None
    server: Mapping[str, str] = field(default_factory=dict)


def run(
    options: VoiceOptions, on_note: Callable[[str], None] = lambda note: None
) -> dict[str, Any]:
    """Run the benchmark; returns its figures. Raises ParleyError."""
    return asyncio.run(run_async(options, on_note))


async def run_async(
    options: VoiceOptions, on_note: Callable[[str], None] = lambda note: None
) -> dict[str, Any]:
    """``run`` inside an event loop."""
    line = None
    if options.provider == "audiosocket":
        line = AudioSocketPort.of(options.url, options.audiosocket_port)
    recordings = None
    if options.speech is not None:
        on_note("reading the recordings")
        recordings = Recordings(options.speech, VadModel())
        lines = recordings.distribute(options.callers, options.turns)
        for why in recordings.left_out.values():
            on_note(f"left out: {why}")
    else:
        on_note("synthesising the script")
        lines = _script_lines(options)
    tally = Tally()
    async with AsyncExitStack() as stack:
        pid, url = None, options.url
        if url is None:
            env = dict(options.server) | ({} if line is None else line.settings)
            own = await stack.enter_async_context(own_server(home=options.home, settings=env))
            url, pid = own.url, own.process.pid
        cpu_before, started = _cpu(pid), time.monotonic()
        await _call_all(
            [_Caller(n, said, tally, options, line, on_note) for n, said in enumerate(lines)], url
        )
        wall_s, cpu_after = time.monotonic() - started, _cpu(pid)
    cpu_s = None if cpu_before is None or cpu_after is None else cpu_after - cpu_before
    figures = tally.to_dict(options.callers, cpu_s, wall_s)
    if recordings is not None:
        for name in ("barge_in_ms", "missed_barge_ins"):  # recordings do not interrupt
            del figures[name]
        figures["recordings"] = recordings.to_dict()
    return figures


def _script_lines(options: VoiceOptions) -> list[list[Utterance]]:
    """The script for each caller, started at different lines."""
    settings = load_settings(home=options.home)
    voice, vad = Synthesizer(ModelStore(settings.home).resolve(settings.tts_model)), VadModel()
    script = [speak_line(line, voice, vad) for line in SCRIPT[: options.turns]]
    return [
        [script[(index + 3 * number) % len(script)] for index in range(options.turns)]
        for number in range(options.callers)
    ]


async def _call_all(callers: Sequence[_Caller], url: str) -> None:
    """Run all calls. Raises the first ParleyError of a caller; the others then hang up."""
    try:
        async with asyncio.TaskGroup() as calls:
            for caller in callers:
                calls.create_task(caller.talk(url))
    except ExceptionGroup as errors:
        ours, others = errors.split(ParleyError)
        if ours is None or others is not None:
            raise
        raise ours.exceptions[0] from errors


def _cpu(pid: int | None) -> float | None:
    return None if pid is None else cpu_seconds(pid)


@dataclass
class _Caller:
    number: int
    says: Sequence[Utterance]
    tally: Tally
    options: VoiceOptions
    line: AudioSocketPort | None
    on_note: Callable[[str], None]

    def _open(self, url: str) -> AbstractAsyncContextManager[TalkClient | CallClient]:
        options = self.options
        if options.provider is None:
            return open_talk(url, api_key=options.api_key)
        audiosocket = None if self.line is None else self.line.at(url)
        return open_call(url, options.provider, api_key=options.api_key, audiosocket=audiosocket)

    async def talk(self, url: str) -> None:
        await asyncio.sleep(self.number * _STAGGER_S)
        async with self._open(url) as client:
            if isinstance(client, CallClient):
                await client.hear_greeting()
            for index, said in enumerate(self.says):
                await self._say(client, said, index)

    async def _say(self, client: TalkClient | CallClient, said: Utterance, index: int) -> None:
        name = f"caller {self.number + 1}, {index + 1}/{len(self.says)}, {said.audio.path.name}"
        try:
            result = await client.speak(said.audio, timeout_s=_TIMEOUT_S)
        except (NoSpeechError, NoReplyError) as error:
            self.tally.count_missed(said)
            self.on_note(f"{name}: {error}")
            return
        self.tally.count(said, result)
        if self.options.record is not None:
            file = f"caller{self.number + 1}_{index + 1:02d}.wav"
            result.recording.write(self.options.record / file)
        turns = list(zip(result.turns, result.gaps_ms, strict=True))
        waits = ", ".join(wait_note(turn, gap) for turn, gap in turns)
        heard = " | ".join(
            " / ".join(text or "-" for text in t.heard.values()) for t, _ in turns if t.heard
        )
        self.on_note(f"{name}: {waits}; heard {heard!r}")


def wait_note(turn: LoggedTurn, gap_ms: float | None) -> str:
    """The wait for an answer, as text."""
    if turn.is_withdrawn:
        return "answered too early and withdrawn"
    return "no sound" if gap_ms is None else f"{gap_ms:.0f} ms"
