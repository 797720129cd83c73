"""The script of the voice benchmark, spoken by the installed voice."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np

from app.clients.recording import RATE, VoicedFrames
from app.clients.talk import CallerAudio
from audio.codecs import to_pcm16
from audio.frame import Samples, silence
from audio.resample import resample
from audio.tts.synthesizer import Synthesizer
from audio.vad import VadModel

_LEAD_S = 0.3
_TAIL_S = 0.2
# A room is never digitally silent.
_ROOM_LEVEL = 10 ** (-65 / 20)


class Kind(Enum):
    """Shape of an utterance."""

    PLAIN = "plain"
    PAUSE = "pause"
    """A pause in mid-sentence: one turn, with one answer."""
    BARGE_IN = "barge_in"
    """A question, and a second one that interrupts the answer to the first."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the script. ``before``: the text before the pause or the interruption."""

    kind: Kind
    text: str
    before: str = ""
    pause_s: float = 0.0


SCRIPT = (
    Line(Kind.PLAIN, "What is the capital of France?"),
    Line(Kind.PAUSE, "with my little daughter on Sunday?", "Where can I go", 0.7),
    Line(Kind.BARGE_IN, "Stop. What color is the sky?", "Tell me a long story about a dog.", 2.4),
    Line(Kind.PLAIN, "Please tell me something about the moon."),
    Line(Kind.PAUSE, "a cake for two people.", "I would like to know how to make", 0.9),
    Line(Kind.PLAIN, "How many days are in a week?"),
    Line(Kind.PLAIN, "Can you recommend a good book for a long train ride?"),
    Line(Kind.BARGE_IN, "Wait. How old are whales?", "Explain to me how rain is made.", 2.4),
    Line(Kind.PAUSE, "coffee or tea in the morning?", "Is it better to drink", 0.8),
    Line(Kind.PLAIN, "Thank you, that was very helpful."),
    Line(Kind.PLAIN, "What should I cook for dinner tonight?"),
    Line(Kind.PAUSE, "the three largest cities in Germany.", "Please name", 1.0),
    Line(Kind.PLAIN, "Why do cats sleep so much?"),
    Line(Kind.PLAIN, "Give me one tip for a job interview."),
    Line(Kind.BARGE_IN, "Sorry. Which one is the fastest?", "Tell me all about horses.", 2.4),
    Line(Kind.PLAIN, "Do I need an umbrella in London?"),
)


@dataclass(frozen=True, slots=True)
class Utterance:
    """The audio that a caller sends without waiting for an answer in between.

    ``text``: its words, None where they are unknown. ``second_from``: the sample at which the part
    after the pause or the interruption begins.
    """

    kind: Kind
    text: str | None
    audio: CallerAudio
    second_from: int = 0

    @property
    def num_turns(self) -> int:
        """Turns of the caller in it."""
        return 2 if self.kind is Kind.BARGE_IN else 1


def speak_line(line: Line, voice: Synthesizer, vad: VadModel) -> Utterance:
    """The recording of a caller who says ``line``. Raises AudioError."""
    rng = np.random.default_rng(len(line.text))
    if line.kind is Kind.PAUSE:
        # One sentence, cut at its quietest place near the pause, so that its intonation goes on.
        whole = _spoken(f"{line.before} {line.text}", voice)
        near = _spoken(line.before, voice).size / max(
            1, _spoken(line.before, voice).size + _spoken(line.text, voice).size
        )
        cut = _quietest(whole, near)
        first, second = whole[:cut], whole[cut:]
    else:
        first = _spoken(line.before, voice) if line.before else silence(0)
        second = _spoken(line.text, voice)
    gap = silence(int(line.pause_s * RATE))
    parts = [silence(int(_LEAD_S * RATE)), first, gap, second, silence(int(_TAIL_S * RATE))]
    second_from = sum(part.size for part in parts[:3])
    samples = np.concatenate(parts)
    samples += rng.normal(0.0, _ROOM_LEVEL, samples.size).astype(np.float32)
    audio = CallerAudio(
        Path(line.text), to_pcm16(samples), VoicedFrames(samples, RATE, vad), voice.sample_rate
    )
    return Utterance(line.kind, f"{line.before} {line.text}".strip(), audio, second_from)


def plain_script(voice: Synthesizer, vad: VadModel) -> list[Utterance]:
    """The questions of the script without pauses and interruptions."""
    return [speak_line(line, voice, vad) for line in SCRIPT if line.kind is Kind.PLAIN]


def speech_at(spoken: Samples, voice: Synthesizer, rate: int) -> Samples:
    """Output of ``voice``, float32 [n], resampled to ``rate``."""
    return resample(spoken, voice.sample_rate, rate)


def _spoken(text: str, voice: Synthesizer) -> Samples:
    return speech_at(voice.synthesize(text), voice, RATE)


def _quietest(samples: Samples, near: float) -> int:
    """Middle of the quietest 30 ms within 0.2 s of the fraction ``near`` of ``samples``."""
    window, reach = RATE * 30 // 1000, RATE // 5
    middle = int(samples.size * near)
    starts = range(max(0, middle - reach), min(samples.size - window, middle + reach), RATE // 200)
    best = min(starts, key=lambda s: float(np.square(samples[s : s + window]).sum()))
    return best + window // 2
