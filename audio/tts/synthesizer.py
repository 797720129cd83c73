"""Speech synthesis with a Piper voice (VITS in ONNX; rhasspy/piper, OHF-Voice/piper1-gpl).

Audio is streamed in pieces: the first one is short, so that it plays while the rest is synthesized;
the length of later ones depends on the load of the machine. See ``audio.tts.vits``.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from piper import PiperConfig, PiperVoice

from audio.errors import AudioError, ModelError
from audio.frame import Samples
from audio.onnx_session import ORT_ERRORS
from audio.text import CLOSERS, normalize
from audio.tts.postprocess import SpeechPostprocessor, gain_for
from audio.tts.vits import Utterance, VitsSession

_FAILURES: tuple[type[Exception], ...] = (*ORT_ERRORS, ValueError, OSError)

MIN_SPEED, MAX_SPEED = 0.25, 4.0
MAX_PIECE_CHARS = 300
"""Longer texts are split: the attention of the text encoder is quadratic in the phonemes."""

_SENTENCE_PAUSE_MS = 220
_CLAUSE_PAUSE_MS = 90
_BARE_PAUSE_MS = 30  # no punctuation: the sentence goes on in the next clause

# The voice's level is measured on this.
_SAMPLE = "Hello there, this is a first sentence."
# The first piece: a quarter of a second, 50 ms of it silence that is cut.
_MIN_FRAMES = 20
# Share of the buffered audio's duration that synthesizing the next piece may take.
_SYNTHESIS_SHARE = 0.5
# Without urgency pieces are long, since each costs its halos, but limited: another caller's may
# become urgent, and a running piece is not interrupted. Half a minute in one run also took a
# gigabyte, which the decoder's session keeps.
_MAX_PIECE_S = 2.0

# Cache of short clauses ("Sure,", "Yes,"): about 1 s of audio each, 100 kB.
_MAX_CACHED = 128
_MAX_CACHED_CHARS = 24
_OPENINGS = ("Sure,", "Yes,", "No,", "Okay,", "Of course,", "Hello!", "Hi!", "I'm sorry,", "Sorry,")

_LETTER_RUN = re.compile(r"\b[A-Z](?: [A-Z])+(?:'s)?\b")
_LETTER_A = re.compile(r"(?<=[\w,] )A\b(?!['.])")


@dataclass(frozen=True, slots=True)
class SpeechPiece:
    """Part of the audio of a text, in order.

    ``samples``: float32 [n] at the voice's rate. ``total_len``: samples of the whole, an estimate
    until the last piece.
    """

    samples: Samples
    total_len: int
    is_last: bool = False


class Synthesizer:
    """One voice, loaded once and shared by all callers and threads.

    ``synthesize`` and ``stream`` may be called from several threads at a time: ONNX sessions are
    re-entrant and the library guards espeak-ng, whose state is global, with a lock of its own
    (about 0.3 ms).

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
        config = _config(voice)
        self._net = VitsSession(voice, num_threads)
        # It turns text into ids; its own session is never run.
        self._phonemes = PiperVoice(session=cast(Any, None), config=config)
        self._noise_scale = config.noise_scale if noise_scale is None else noise_scale
        self._noise_w_scale = config.noise_w_scale if noise_w_scale is None else noise_w_scale
        self._length_scale = config.length_scale
        self._sid = config.default_speaker_id if config.num_speakers > 1 else None
        self.sample_rate: int = config.sample_rate
        self._cache: OrderedDict[tuple[str, float], Samples] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._gain = self._measure_gain(voice)

    def warm_up(self) -> None:
        """Synthesize common openings into the cache."""
        for opening in _OPENINGS:
            self.synthesize(opening)

    def synthesize(self, text: str, *, speed: float = 1.0) -> Samples:
        """Synthesize ``text`` (English, as displayed): float32 [n] at ``sample_rate``.

        The text is normalised first. At most 10 ms of leading silence; the pause at the end depends
        on the last punctuation. Empty for text without anything to say. ``speed`` in [0.25, 4]
        changes the duration but not the pitch. Raises AudioError for another speed, ModelError
        when the network fails.
        """
        return _joined(piece.samples for piece in self.stream(text, speed=speed, is_urgent=False))

    def stream(
        self, text: str, *, speed: float = 1.0, is_urgent: bool = True
    ) -> Iterator[SpeechPiece]:
        """Synthesize in pieces; the first one is short if ``is_urgent``.

        Yields at least one piece, an empty one for text without anything to say.
        """
        if not MIN_SPEED <= speed <= MAX_SPEED:  # also refuses NaN
            raise AudioError(f"speed is {speed}; it must be from {MIN_SPEED} to {MAX_SPEED}")
        key = (text.strip(), speed)
        with self._cache_lock:
            if (known := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
        if known is not None:
            yield SpeechPiece(known.copy(), len(known), is_last=True)
            return
        made: list[Samples] = []
        for piece in self._stream(text, speed, is_urgent=is_urgent):
            made.append(piece.samples)
            if piece.is_last and len(key[0]) <= _MAX_CACHED_CHARS:
                self._add_to_cache(key, _joined(made))
            yield piece

    def _add_to_cache(self, key: tuple[str, float], samples: Samples) -> None:
        with self._cache_lock:
            self._cache[key] = samples.copy()
            if len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)

    def _stream(self, text: str, speed: float, *, is_urgent: bool) -> Iterator[SpeechPiece]:
        spoken = normalize(text)
        if not spoken:
            yield SpeechPiece(np.zeros(0, np.float32), 0, is_last=True)
            return
        tail = text.rstrip().rstrip(CLOSERS)
        pieces = split_long(spoken, MAX_PIECE_CHARS)
        sentences: list[tuple[list[str], float]] = []
        try:
            for piece in pieces:
                found = [s for s in self._phonemes.phonemize(pronounceable(piece)) if any(s)]
                last_char = tail[-1:] if piece is pieces[-1] else piece[-1]
                pauses = [_SENTENCE_PAUSE_MS] * (len(found) - 1) + [pause_ms(last_char)]
                sentences += zip(found, (pause / speed for pause in pauses), strict=False)
            yield from self._speak(sentences, speed, is_urgent=is_urgent)
        except _FAILURES as error:
            raise ModelError(
                f"the voice failed on a text of {len(spoken)} characters: {error}"
            ) from error

    def _speak(
        self, sentences: list[tuple[list[str], float]], speed: float, *, is_urgent: bool
    ) -> Iterator[SpeechPiece]:
        """Synthesize sentences (phonemes, pause after them in ms) in order."""
        made_len = 0
        samples = np.zeros(0, np.float32)
        for number, (phonemes, trailing_ms) in enumerate(sentences):
            utterance = self._open(phonemes, speed)
            finisher = SpeechPostprocessor(self.sample_rate, self._gain, trailing_ms)
            while not utterance.is_over:
                num_frames = self._next_len(utterance, made_len if is_urgent else None)
                samples = finisher.process(utterance.decode_frames(num_frames))
                made_len += len(samples)
                num_left = (utterance.num_frames - utterance.num_made) * self._net.hop_len
                if num_left and len(samples):
                    yield SpeechPiece(samples, made_len + num_left)
            samples = np.concatenate((samples, rest)) if len(rest := finisher.flush()) else samples
            made_len += len(rest)
            if number < len(sentences) - 1:
                yield SpeechPiece(samples, made_len)
        yield SpeechPiece(samples, made_len, is_last=True)

    def _open(self, phonemes: list[str], speed: float) -> Utterance:
        ids = self._phonemes.phonemes_to_ids(phonemes)
        scales = [self._noise_scale, self._length_scale / speed, self._noise_w_scale]
        return self._net.open(ids, scales, self._sid)

    def _next_len(self, utterance: Utterance, made_len: int | None) -> int:
        """Frames of the next piece, few enough that it is ready before the audio made so far has
        played. ``made_len``: samples made; None: not urgent."""
        left = utterance.num_frames - utterance.num_made
        max_len = round(_MAX_PIECE_S * self.sample_rate / self._net.hop_len)
        if made_len is None:
            return left if left <= max_len * 3 // 2 else max_len
        frame_s, cost_s = self._net.hop_len / self.sample_rate, self._net.decode_s
        around = 2 * self._net.halo_len
        if not made_len:
            next_s = (_MIN_FRAMES + around) * cost_s
            num_frames = max(_MIN_FRAMES, round(next_s / _SYNTHESIS_SHARE / frame_s))
        else:
            in_hand_s = made_len / self.sample_rate
            num_frames = max(_MIN_FRAMES, round(in_hand_s * _SYNTHESIS_SHARE / cost_s) - around)
            num_frames = min(num_frames, max_len)
        # A short remainder is not worth a piece of its own.
        return left if left <= num_frames + _MIN_FRAMES // 2 else num_frames

    def _measure_gain(self, voice: Path) -> float:
        try:
            (phonemes, *_) = self._phonemes.phonemize(_SAMPLE)
            utterance = self._open(phonemes, 1.0)
            return gain_for(utterance.decode_frames(utterance.num_frames), self.sample_rate)
        except _FAILURES as error:
            raise ModelError(f"{voice} does not speak: {error}") from error


def pause_ms(last_char: str) -> int:
    """Pause in ms after a clause that ends in ``last_char``."""
    if last_char and last_char in ".!?…。！？":
        return _SENTENCE_PAUSE_MS
    if last_char and last_char in ",;:—–-，、；：":
        return _CLAUSE_PAUSE_MS
    return _BARE_PAUSE_MS


def pronounceable(spoken: str) -> str:
    """Respell ``spoken`` so that espeak-ng pronounces it correctly.

    Spelled letters become "A.P.I": a capital A by itself is read as the article.
    """
    dotted = _LETTER_RUN.sub(lambda m: m[0].replace(" ", "."), spoken)
    return _LETTER_A.sub("eigh", dotted)


def split_long(spoken: str, max_chars: int) -> list[str]:
    """Split ``spoken`` into pieces of ``max_chars`` at sentences, else commas, else words."""
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


def _joined(parts: Iterable[Samples]) -> Samples:
    found = [part for part in parts if len(part)]
    return np.concatenate(found) if found else np.zeros(0, np.float32)


def _config(voice: Path) -> PiperConfig:
    if voice.is_dir():
        raise ModelError(f"{voice} is a folder: name the file of the voice in it, *.onnx")
    config_path = voice.with_name(voice.name + ".json")
    for path in (voice, config_path):
        if not path.is_file():
            raise ModelError(f"the voice needs the file {path}, which does not exist")
    try:
        return PiperConfig.from_dict(json.loads(config_path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{config_path} is not the description of a Piper voice: {error!r}"
        ) from error
