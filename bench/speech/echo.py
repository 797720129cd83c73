"""Echo of our own voice: turns wrongly started by it, and callers detected over it.

    python -m bench.speech.echo ../shared/data [--json OUT]

The installed voice speaks answers that return through a room (T60 0.3 s), 50 to 500 ms late, at -3,
-10 and -20 dB, with noise. Alone, every turn that starts is wrong. With the recording of a caller
over it, at normal level: delay from the onset of the caller's voice to the start of the turn.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

import numpy as np

from app.clients.recording import VoicedFrames
from app.conversation.input.audio_input import AudioInput
from app.conversation.session_config import SessionConfig, TurnDetection
from audio.codecs import AudioFormat
from audio.endpointing.vad_endpointer import VoiceStarted
from audio.frame import SPEECH_RATE, Samples
from audio.vad import VadModel
from bench.harness.results import Result, add_json_option, report
from bench.harness.speech import installed_voice, load_speech
from bench.voice.script import speech_at

_ANSWERS = (
    "The capital of France is Paris. It lies on the Seine, and two million people live there.",
    "Sure! First you mix the flour with the eggs, then you add milk and a little salt.",
    "I would bring an umbrella. It will most likely rain in the afternoon, and the wind is strong.",
)
_CALLERS = ("az_weather", "un_dog_or_cat", "sb_calc", "ls_1688-142285-0002")
_LEVELS_DB, _DELAYS_MS = (-3, -10, -20, -90), (50, 150, 300, 500)  # -90: no echo
_CALLER_AT_S = 1.8
_PACKET = SPEECH_RATE // 50


class Listener:
    """The audio input of one call."""

    def __init__(self, vad: VadModel) -> None:
        config = SessionConfig(
            "",
            input_format=AudioFormat("pcm16", SPEECH_RATE),
            turn_detection=TurnDetection(kind="semantic_vad"),
        )
        self.input = AudioInput(vad, config, eager_silence_ms=160, max_buffer_s=300)

    def turn_start(self, played: Samples, received: Samples, since: int = 0) -> int | None:
        """Feed ``received`` while ``played`` is played out; the sample at which the first turn
        after sample ``since`` is detected."""
        begin = self.input.position
        self.input.echo.add_playback(played, SPEECH_RATE, begin)
        found = None
        for start in range(0, received.size, _PACKET):
            for event in self.input.process_audio(received[start : start + _PACKET], start):
                at = self.input.position - begin
                if isinstance(event, VoiceStarted) and at >= since and found is None:
                    found = at
        return found

    def feed_silence(self) -> None:
        """Two seconds of room noise."""
        quiet = np.random.default_rng(9).normal(0, 3e-4, 2 * SPEECH_RATE).astype(np.float32)
        for start in range(0, quiet.size, _PACKET):
            list(self.input.process_audio(quiet[start : start + _PACKET], start))
        self.input.clear()


def in_room(played: Samples, delay_ms: int, level_db: float, seed: int) -> Samples:
    """``played`` as the microphone receives it."""
    dice = np.random.default_rng(seed)
    decay = np.exp(-6.9 * np.arange(int(0.3 * SPEECH_RATE)) / (0.3 * SPEECH_RATE))
    room = dice.normal(0, 0.05, decay.size) * decay
    room[0] = 1.0
    wet = np.convolve(played, room)
    wet *= 10 ** (level_db / 20) * np.sqrt(np.mean(played**2) / np.mean(wet[: played.size] ** 2))
    wet = np.pad(wet, (delay_ms * SPEECH_RATE // 1000, 0))
    noisy: Samples = (wet + dice.normal(0, 5e-4, wet.size)).astype(np.float32)
    return noisy


def caller_over(echo: Samples, caller: Samples, vad: VadModel) -> tuple[Samples, int]:
    """``echo`` mixed with a caller at normal level, and the sample of the onset of its voice."""
    loud = caller / max(1e-6, float(np.abs(caller).max())) * 0.4
    onset = VoicedFrames(loud, SPEECH_RATE, vad).first_after(0) or 0
    at = int(_CALLER_AT_S * SPEECH_RATE)
    both = np.pad(echo, (0, max(0, at + loud.size - echo.size)))
    both[at : at + loud.size] += loud
    return both, at + onset


def measure(data: Path) -> Result:
    """A row for each level of the echo."""
    voice, vad = installed_voice()
    answers = [speech_at(voice.synthesize(text), voice, SPEECH_RATE) for text in _ANSWERS]
    callers = [load_speech(data / "speech" / f"{name}.flac") for name in _CALLERS]
    mixes = len(_DELAYS_MS) * len(answers)
    result = Result(
        (
            *("echo", f"turns by the 1st answer, of {mixes}", f"by later answers, of {mixes}"),
            f"callers detected, of {mixes * len(callers)}",
            *("median delay, ms", "longest, ms"),
        )
    )
    for level_db in _LEVELS_DB:
        num_first, num_later = 0, 0
        delays_ms = []
        for delay_ms in _DELAYS_MS:
            for number, answer in enumerate(answers):
                echo = in_room(answer, delay_ms, level_db, seed=number)
                listener = Listener(vad)
                num_first += listener.turn_start(answer, echo) is not None
                listener.feed_silence()
                num_later += listener.turn_start(answer, echo) is not None
                for caller in callers:
                    both, onset = caller_over(echo, caller, vad)
                    listener = Listener(vad)
                    listener.turn_start(answer, echo)  # not the first answer of the call
                    listener.feed_silence()
                    started = listener.turn_start(answer, both, since=onset - 1_600)
                    if started is not None:
                        delays_ms.append((started - onset) * 1000 / SPEECH_RATE)
        late = (round(median(delays_ms)), round(max(delays_ms))) if delays_ms else (None, None)
        result.add(f"{level_db} dB", num_first, num_later, len(delays_ms), *late)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    add_json_option(parser)
    options = parser.parse_args()
    report(measure(options.data), options)


if __name__ == "__main__":
    main()
