"""Our own voice in the caller's microphone: who is taken for the caller, and is the caller heard?

    python -m bench.speech.echo ../shared/data

The installed voice speaks answers; they come back through a room (T60 0.3 s), 50 to 500 ms late, at
-3, -10 and -20 dB, with noise. Alone: turns that begin are wrong. With a caller's recording over
it, as loud as a caller is: how late the caller's turn begins after the voice does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

import numpy as np

from app.clients.recording import VoicedFrames
from app.config import load_settings
from app.conversation.input.audio_input import AudioInput
from app.conversation.session_config import SessionConfig, TurnDetection
from app.models.store import ModelStore
from audio.codecs import AudioFormat
from audio.endpointing.vad_endpointer import VoiceStarted
from audio.files.reader import read_audio
from audio.frame import SPEECH_RATE, Samples
from audio.resample import resample
from audio.tts.synthesizer import Synthesizer
from audio.vad import VadModel

_ANSWERS = (
    "The capital of France is Paris. It lies on the Seine, and two million people live there.",
    "Sure! First you mix the flour with the eggs, then you add milk and a little salt.",
    "I would bring an umbrella. It will most likely rain in the afternoon, and the wind is strong.",
)
_CALLERS = ("az_weather", "un_dog_or_cat", "sb_calc", "ls_1688-142285-0002")
_LEVELS_DB, _DELAYS_MS = (-3, -10, -20, -90), (50, 150, 300, 500)  # -90: none
_CALLER_AT_S = 1.8
_PACKET = SPEECH_RATE // 50


def main() -> None:
    """Measure and print a table."""
    data = Path(sys.argv[1])
    settings = load_settings()
    voice = Synthesizer(ModelStore(settings.home).resolve(settings.tts_model))
    vad = VadModel()
    answers = [speech_rate(voice.synthesize(text), voice.sample_rate) for text in _ANSWERS]
    callers = [speech_rate(*read_audio(data / "speech" / f"{name}.flac")) for name in _CALLERS]
    print("| echo | turns begun by it, 1st answer | later answers | caller heard over it | late |")
    print("|---|---|---|---|---|")
    for level_db in _LEVELS_DB:
        first, later, lates, num = 0, 0, [], 0
        for delay_ms in _DELAYS_MS:
            for number, answer in enumerate(answers):
                echo = in_room(answer, delay_ms, level_db, seed=number)
                ear = Ear(vad)
                first += ear.hear(answer, echo) is not None
                ear.rest()
                later += ear.hear(answer, echo) is not None
                for caller in callers:
                    num += 1
                    over = caller / max(1e-6, float(np.abs(caller).max())) * 0.4
                    onset = VoicedFrames(over, SPEECH_RATE, vad).first_after(0) or 0
                    at = int(_CALLER_AT_S * SPEECH_RATE)
                    both = np.pad(echo, (0, max(0, at + over.size - echo.size)))
                    both[at : at + over.size] += over
                    ear = Ear(vad)
                    ear.hear(answer, echo)  # the call goes on for a while already
                    ear.rest()
                    started = ear.hear(answer, both, since=at + onset - 1_600)
                    if started is not None:
                        lates.append((started - at - onset) * 1000 / SPEECH_RATE)
        mixes = len(_DELAYS_MS) * len(answers)
        late = f"{median(lates):.0f} ms, {max(lates):.0f} at most" if lates else "-"
        print(
            f"| {level_db} dB | {first} of {mixes} | {later} of {mixes} "
            f"| {len(lates)} of {num} | {late} |",
            flush=True,
        )


class Ear:
    """One call's listener."""

    def __init__(self, vad: VadModel) -> None:
        config = SessionConfig(
            "",
            input_format=AudioFormat("pcm16", SPEECH_RATE),
            turn_detection=TurnDetection(kind="semantic_vad"),
        )
        self.listener = AudioInput(vad, config, eager_silence_ms=160, max_buffer_s=300)

    def hear(self, played: Samples, heard: Samples, since: int = 0) -> int | None:
        """Where a turn was found to begin (when, not since when), from sample ``since`` on."""
        begun = self.listener.position
        self.listener.echo.play(played, SPEECH_RATE, begun)
        found = None
        for start in range(0, heard.size, _PACKET):
            for event in self.listener.feed(heard[start : start + _PACKET], start):
                at = self.listener.position - begun
                if isinstance(event, VoiceStarted) and at >= since and found is None:
                    found = at
        return found

    def rest(self) -> None:
        """Nobody speaks for two seconds."""
        quiet = np.random.default_rng(9).normal(0, 3e-4, 2 * SPEECH_RATE).astype(np.float32)
        for start in range(0, quiet.size, _PACKET):
            list(self.listener.feed(quiet[start : start + _PACKET], start))
        self.listener.forget()


def in_room(played: Samples, delay_ms: int, level_db: float, seed: int) -> Samples:
    dice = np.random.default_rng(seed)
    decay = np.exp(-6.9 * np.arange(int(0.3 * SPEECH_RATE)) / (0.3 * SPEECH_RATE))
    room = dice.normal(0, 0.05, decay.size) * decay
    room[0] = 1.0
    wet = np.convolve(played, room)
    wet *= 10 ** (level_db / 20) * np.sqrt(np.mean(played**2) / np.mean(wet[: played.size] ** 2))
    wet = np.pad(wet, (delay_ms * SPEECH_RATE // 1000, 0))
    noisy: Samples = (wet + dice.normal(0, 5e-4, wet.size)).astype(np.float32)
    return noisy


def speech_rate(samples: Samples, rate: int) -> Samples:
    return resample(samples, rate, SPEECH_RATE)


if __name__ == "__main__":
    main()
