"""Speech from text with a Piper voice (VITS in ONNX; rhasspy/piper, OHF-Voice/piper1-gpl).

Measured on two busy cores of an AMD EPYC with en_US-joe-medium (compare, do not quote): 2, 4, 8 and
16 words (0.7, 1.0, 2.2 and 4.5 s of audio) take 74, 107, 256 and 480 ms on one thread, phonemes
0.16 to 0.36 ms of that. 53 % of the network's time are the decoder's convolutions, 14 % the flow's.
Two threads cost 15 to 45 % more CPU and gain nothing while the other core has work. Graph
optimisation (basic, extended, all), arena, memory patterns and flush-to-zero make no difference
beyond noise.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors
from piper import PiperConfig, PiperVoice, SynthesisConfig

from audio.clause_rules import CLOSERS
from audio.errors import AudioError, ModelError
from audio.normalize import normalize

# They share no base but Exception.
_ORT_ERRORS: tuple[type[Exception], ...] = (
    ort_errors.EPFail,
    ort_errors.EngineError,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NoModel,
    ort_errors.NoSuchFile,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
    RuntimeError,
)
_FAILURES: tuple[type[Exception], ...] = (*_ORT_ERRORS, ValueError, OSError)

Samples = NDArray[np.float32]

MIN_SPEED, MAX_SPEED = 0.25, 4.0
MAX_PIECE_CHARS = 300
"""Longer texts are split: the attention of the text encoder is quadratic in the phonemes."""

_LEAD_MS = 8
_SENTENCE_PAUSE_MS = 220
_CLAUSE_PAUSE_MS = 90
_BARE_PAUSE_MS = 30  # no punctuation: the sentence goes on in the next clause
_FADE_MS = 3
_SILENCE_RATIO = 0.02  # of the loudest window: 34 dB below
_SILENCE_FLOOR = 0.002
_WINDOW_MS = 2
_TARGET_RMS = 0.085  # -21 dBFS while there is voice
_MIN_GAIN, _MAX_GAIN = 0.5, 3.0
_PEAK = 0.95

# Short clauses come again and again ("Sure,", "Yes,"): about 1 s of audio each, 100 kB.
_MAX_KEPT = 128
_MAX_KEPT_CHARS = 24
_OPENINGS = ("Sure,", "Yes,", "No,", "Okay,", "Of course,", "Hello!", "Hi!", "I'm sorry,", "Sorry,")

_LETTER_RUN = re.compile(r"\b[A-Z](?: [A-Z])+(?:'s)?\b")
_LETTER_A = re.compile(r"(?<=[\w,] )A\b(?!['.])")


class Synthesizer:
    """One voice, loaded once and shared by all callers and threads.

    ``synthesize`` may be called from several threads at a time: the ONNX session is re-entrant and
    the library guards espeak-ng, whose state is global, with a lock of its own (about 0.3 ms).

    ``noise_scale`` and ``noise_w_scale`` override the voice's own; both 0 make the output depend
    on the text alone. Raises ModelError when the voice cannot be loaded.
    """

    def __init__(
        self,
        voice: Path,
        *,
        num_threads: int = 1,
        noise_scale: float | None = None,
        noise_w_scale: float | None = None,
    ) -> None:
        self._voice = _load(voice, num_threads)
        self._noise_scale = noise_scale
        self._noise_w_scale = noise_w_scale
        self.sample_rate: int = self._voice.config.sample_rate
        self._said: OrderedDict[tuple[str, float], Samples] = OrderedDict()
        self._said_lock = threading.Lock()

    def warm_up(self) -> None:
        """Runs the network and espeak-ng once, so that the first caller does not wait for them.

        What many answers begin with is spoken now, and then costs nothing.
        """
        self.synthesize("Hello there, this is a first sentence.")
        for opening in _OPENINGS:
            self.synthesize(opening)

    def synthesize(self, text: str, *, speed: float = 1.0) -> Samples:
        """Speech for ``text`` (English, as it is displayed), float32[n] at ``sample_rate``.

        The text is normalised first. At most 10 ms of silence lead; the pause behind suits the
        last punctuation. Empty for text with nothing to say. ``speed`` in [0.25, 4] shortens the
        sounds without changing the pitch. Raises AudioError for another speed, ModelError when the
        network fails.
        """
        if not MIN_SPEED <= speed <= MAX_SPEED:  # also refuses NaN
            raise AudioError(f"speed is {speed}; it must be from {MIN_SPEED} to {MAX_SPEED}")
        key = (text.strip(), speed)
        with self._said_lock:
            if (known := self._said.get(key)) is not None:
                self._said.move_to_end(key)
                return known.copy()
        samples = self._synthesize(text, speed)
        if len(key[0]) <= _MAX_KEPT_CHARS:
            with self._said_lock:
                self._said[key] = samples.copy()
                if len(self._said) > _MAX_KEPT:
                    self._said.popitem(last=False)
        return samples

    def _synthesize(self, text: str, speed: float) -> Samples:
        spoken = normalize(text)
        if not spoken:
            return np.zeros(0, np.float32)
        tail = text.rstrip().rstrip(CLOSERS)
        pieces = split_long(spoken, MAX_PIECE_CHARS)
        parts: list[Samples] = []
        for index, piece in enumerate(pieces):
            last_char = tail[-1:] if index == len(pieces) - 1 else piece[-1]
            parts += self._speak(piece, pause_ms(last_char) / speed, speed)
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def _speak(self, spoken: str, last_pause_ms: float, speed: float) -> list[Samples]:
        config = SynthesisConfig(
            length_scale=self._voice.config.length_scale / speed,
            noise_scale=self._noise_scale,
            noise_w_scale=self._noise_w_scale,
        )
        try:
            sentences = [s for s in self._voice.phonemize(pronounceable(spoken)) if any(s)]
            parts = []
            for index, phonemes in enumerate(sentences):
                is_last = index == len(sentences) - 1
                pause = last_pause_ms if is_last else _SENTENCE_PAUSE_MS / speed
                raw = self._voice.phoneme_ids_to_audio(
                    self._voice.phonemes_to_ids(phonemes), config
                )
                audio = np.atleast_1d(np.asarray(raw, np.float32))
                parts.append(finish(audio, self.sample_rate, pause))
        except _FAILURES as error:
            raise ModelError(
                f"the voice failed on a text of {len(spoken)} characters: {error}"
            ) from error
        return parts


def pause_ms(last_char: str) -> int:
    """The silence that belongs behind a clause ending in ``last_char``."""
    if last_char and last_char in ".!?…。！？":
        return _SENTENCE_PAUSE_MS
    if last_char and last_char in ",;:—–-，、；：":
        return _CLAUSE_PAUSE_MS
    return _BARE_PAUSE_MS


def pronounceable(spoken: str) -> str:
    """``spoken`` in the spelling that espeak-ng reads rightly.

    Letters one by one become "A.P.I": alone, a capital A is read as the article.
    """
    dotted = _LETTER_RUN.sub(lambda m: m[0].replace(" ", "."), spoken)
    return _LETTER_A.sub("eigh", dotted)


def split_long(spoken: str, max_chars: int) -> list[str]:
    """``spoken`` in pieces of at most ``max_chars``, cut at sentences, else commas, else words."""
    pieces: list[str] = []
    rest = spoken.strip()
    while len(rest) > max_chars:
        cut = 0
        for pattern in (r"[.!?]\s", r"[,;:]\s", r"\s"):
            ends = [m.end() for m in re.finditer(pattern, rest[:max_chars])]
            if ends and ends[-1] >= max_chars // 3:
                cut = ends[-1]
                break
        cut = cut or max_chars
        pieces.append(rest[:cut].strip())
        rest = rest[cut:].strip()
    if rest:
        pieces.append(rest)
    return pieces


def finish(audio: Samples, rate_hz: int, trailing_ms: float) -> Samples:
    """Trims silence, sets the loudness, fades the ends: one sentence from the network.

    Silence is what lies 34 dB below the loudest 2 ms. Loudness is that of the voiced part, so short
    clauses are not louder than long ones, as they would be with peaks scaled to 1.
    """
    window = max(1, rate_hz * _WINDOW_MS // 1000)
    num_windows = len(audio) // window
    if num_windows == 0:
        return np.zeros(0, np.float32)
    power = np.square(audio[: num_windows * window].reshape(num_windows, window)).mean(axis=1)
    rms = np.sqrt(power)
    loudest = float(rms.max())
    if not math.isfinite(loudest) or loudest < _SILENCE_FLOOR:
        return np.zeros(0, np.float32)
    voiced = np.flatnonzero(rms > max(loudest * _SILENCE_RATIO, _SILENCE_FLOOR))
    start = max(0, int(voiced[0]) * window - rate_hz * _LEAD_MS // 1000)
    voice_end = min(len(audio), (int(voiced[-1]) + 1) * window)
    num_trailing = round(rate_hz * trailing_ms / 1000)
    end = min(len(audio), voice_end + num_trailing)

    level = float(np.sqrt(power[rms > loudest * 0.1].mean()))
    gain = min(max(_TARGET_RMS / level, _MIN_GAIN), _MAX_GAIN)
    gain = min(gain, _PEAK / float(np.abs(audio[start:end]).max()))
    speech = (audio[start:end] * gain).astype(np.float32)
    fade = min(rate_hz * _FADE_MS // 1000, len(speech) // 2)
    if fade:
        ramp = np.linspace(0.0, 1.0, fade, dtype=np.float32)
        speech[:fade] *= ramp
        speech[-fade:] *= ramp[::-1]
    num_missing = voice_end + num_trailing - end
    return np.concatenate([speech, np.zeros(num_missing, np.float32)]) if num_missing else speech


def _load(voice: Path, num_threads: int) -> PiperVoice:
    config_path = voice.with_name(voice.name + ".json")
    for path in (voice, config_path):
        if not path.is_file():
            raise ModelError(f"the voice needs the file {path}, which does not exist")
    try:
        config = PiperConfig.from_dict(json.loads(config_path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{config_path} is not the description of a Piper voice: {error!r}"
        ) from error
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    # Idle threads that spin take the core from the LLM and from other callers.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    try:
        session = ort.InferenceSession(str(voice), options, providers=["CPUExecutionProvider"])
    except _ORT_ERRORS as error:
        raise ModelError(f"{voice} is not a readable ONNX voice: {error}") from error
    inputs = {node.name for node in session.get_inputs()}
    if not {"input", "input_lengths", "scales"} <= inputs:
        raise ModelError(f"{voice} is not a Piper voice: its inputs are {sorted(inputs)}")
    return PiperVoice(session=session, config=config)
