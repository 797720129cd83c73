"""Speech recognition: what a caller said, fast for short turns, nothing for noise.

A turn is decoded once over a short context (see asr_decode). When the result looks wrong (see
asr_guard) it is decoded again: over a longer context; then, for a loop, in two halves cut at a
pause; otherwise in faster-whisper's own thorough way.

Against plain faster-whisper (beam 5), tiny.en int8 on one AVX2 thread: on 35 recordings 5.8 % word
errors against 5.6 %, in a quarter of the time below 6 s of audio and 40 % of it around 10 s. On 54
hard ones (noise, telephone, digits, pauses) 11.3 % against 10.7 %, and on two more, where the
library loops for a hundred words, it does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from audio.asr.hallucination_filter import (
    Decoding,
    Fault,
    PunctuationLogprobs,
    Voice,
    better,
    find_fault,
    has_loop,
    has_room,
    is_speech,
    words_of,
)
from audio.asr.segmentation import AudioSegment
from audio.asr.turn_end_probe import MAX_SILENCE_S, TurnEndProbe
from audio.asr.whisper_decoder import FRAMES_PER_S, MAX_FRAMES, WhisperDecoder, compression_ratio
from audio.asr.word_timing import HeardPart, WordTime, words_in
from audio.errors import AudioFormatError, NotWantedError
from audio.frame import SPEECH_RATE, Samples
from audio.vad import VadModel

_PAD_FRAMES = 200
_SHORT_FRAMES = 1_000
_LONG_FRAMES = 1_500
# Longer audio is not decoded over the least context: at 8 s it costs more words than it saves ms.
_SHORT_MAX_CONTENT_FRAMES = 600
_MAX_PIECE_S = (MAX_FRAMES - _PAD_FRAMES) / FRAMES_PER_S
_MIN_SPLIT_S = 2.0
_MAX_SPLITS = 2
_MAX_PROMPT_CHARS = 1_000


@dataclass(frozen=True, slots=True)
class Transcript:
    """What was said; ``text`` is empty when nothing was.

    ``avg_logprob`` is the mean per token (natural log), ``encoder_frames`` (10 ms each) the context
    that was encoded in all runs together, ``num_fallbacks`` the number of runs beyond the first of
    each piece, ``took_ms`` the wall time of the call, ``end_marks`` what the model expects behind
    the last word, ``tail`` what its encoder makes of the last second (asr_tail), ``end_odds`` what
    the fitted rule makes of that (asr_end_rule; None: not known), ``parts`` where the text was
    heard. Without voice the model is not asked: ``encoder_frames`` 0, ``no_speech_prob`` 1.
    """

    text: str
    audio_s: float
    avg_logprob: float
    no_speech_prob: float
    compression_ratio: float
    encoder_frames: int
    num_fallbacks: int
    took_ms: float
    end_marks: PunctuationLogprobs | None = None
    tail: Samples | None = None
    end_odds: float | None = None
    parts: tuple[HeardPart, ...] = field(default=(), repr=False)


@dataclass(slots=True)
class _Job:
    """One call's settings and its count of work."""

    language: str | None
    prompt: str | None
    is_wanted: Callable[[], bool]
    keeps_sound: bool
    is_brief: bool
    num_runs: int = 0
    num_pieces: int = 0
    encoder_frames: int = 0


class Recognizer:
    """A speech model for all callers. Sync and thread-safe: call it in a worker thread."""

    def __init__(self, model_dir: Path, num_threads: int = 1, language: str | None = "en") -> None:
        """Loads a faster-whisper model directory, English-only or multilingual.

        ``language`` is the default for calls that name none; None lets a multilingual model detect
        it. Raises ModelError when the model cannot be loaded, AudioError when it does not know the
        language.
        """
        self._decoder = WhisperDecoder(model_dir, num_threads)
        self._end_rule = TurnEndProbe.of(model_dir)
        self._vad = VadModel()
        self.language = self._decoder.check_language(language)

    @property
    def languages(self) -> tuple[str, ...]:
        """The codes of the languages that the model knows, in order: ("en",), or some hundred."""
        return self._decoder.languages

    def warm_up(self) -> None:
        """Runs every part once, so that the first caller does not pay for lazy set-up (~0.1 s)."""
        noise = np.random.default_rng(0).normal(0.0, 0.01, SPEECH_RATE).astype(np.float32)
        self._vad.probabilities(noise)
        features = self._decoder.features(noise)
        self._decoder.decode(features, _SHORT_FRAMES, self.language, None)

    def transcribe(
        self,
        samples: Samples,
        *,
        prompt: str | None = None,
        language: str | None = None,
        keeps_sound: bool = False,
        is_brief: bool = False,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Transcript:
        """Text of the speech in ``samples`` float32 [n] at 16 kHz, of any length.

        ``prompt`` is earlier text or vocabulary that the speech may continue or contain; one that
        repeats itself is ignored, since it would make the model do so too. ``language`` overrides
        the default. ``keeps_sound``: the transcript holds what ``locate`` needs to be fast (for
        tiny.en 77 kB a second, 0.8 MB at least). ``is_brief``: others wait, so that nothing is
        decoded thoroughly, which cannot be given up and takes seconds. ``is_wanted`` is asked now
        and then, from this thread: work that nobody waits for is given up. Raises AudioFormatError
        for samples that are not finite mono audio, AudioError for an unknown language,
        NotWantedError, and ModelError when the runtime fails.
        """
        started_ns = time.monotonic_ns()
        if samples.ndim != 1 or not np.isfinite(samples).all():
            raise AudioFormatError(f"expected finite mono samples [n], got shape {samples.shape}")
        audio = np.ascontiguousarray(samples, dtype=np.float32)
        job = _Job(
            language=self.language if language is None else self._decoder.check_language(language),
            prompt=_usable_prompt(prompt),
            is_wanted=is_wanted,
            keeps_sound=keeps_sound,
            is_brief=is_brief,
        )
        whole = AudioSegment(audio, self._vad.probabilities(audio)).trimmed()
        heard = [
            decoding
            for piece in whole.parts(_MAX_PIECE_S)
            if (decoding := self._recognise(piece, job)) is not None
        ]
        joined = _join(heard)
        return Transcript(
            text=joined.text,
            audio_s=samples.size / SPEECH_RATE,
            avg_logprob=joined.avg_logprob,
            no_speech_prob=joined.no_speech_prob,
            compression_ratio=joined.compression_ratio,
            encoder_frames=job.encoder_frames,
            num_fallbacks=job.num_runs - job.num_pieces,
            took_ms=(time.monotonic_ns() - started_ns) / 1e6,
            end_marks=joined.end_marks,
            tail=joined.tail,
            end_odds=self._end_odds(joined.tail, whole),
            parts=joined.parts,
        )

    def locate(
        self, transcript: Transcript, *, is_wanted: Callable[[], bool] = lambda: True
    ) -> tuple[WordTime, ...]:
        """When each word of ``transcript``, one of this recogniser's, was said: in order, none
        before the one before it has ended, in seconds of its audio.

        Raises NotWantedError, and ModelError when the runtime fails.
        """
        words: list[WordTime] = []
        for part in transcript.parts:
            if not is_wanted():
                raise NotWantedError("nobody waits for these words any more")
            spans = self._decoder.align(part.piece.samples, part.sound, part.text, part.language)
            words += words_in(part, spans)
        return tuple(words)

    def _end_odds(self, tail: Samples | None, heard: AudioSegment) -> float | None:
        rule = self._end_rule
        if rule is None or tail is None or heard.silence_behind_s > MAX_SILENCE_S:
            return None
        return rule.odds(tail)

    def _recognise(self, piece: AudioSegment, job: _Job) -> Decoding | None:
        """What was said in a piece of at most 28 s; None when nothing was."""
        voice = Voice.measure(piece.probabilities)
        if voice.is_absent:
            return None
        job.num_pieces += 1
        features = self._decoder.features(piece.samples)
        best = self._decode(features, _short_frames(features.shape[1]), job)
        if not is_speech(best, voice):
            return None
        fault = find_fault(best, voice)
        if fault is not None and best.encoder_frames < _LONG_FRAMES:
            again = self._decode(features, _LONG_FRAMES, job)
            if _agree(best, again, voice):
                return _placed(again, piece, job)
            best = better(again, best, voice)
            fault = find_fault(best, voice)
        if fault is None:
            return _placed(best, piece, job)
        if fault is Fault.LOOP and piece.duration_s >= _MIN_SPLIT_S:
            return self._recognise_halves(piece, job, _MAX_SPLITS)
        if job.is_brief:
            return self._heard_briefly(piece, best, fault, voice, job)
        best = better(self._decode_thoroughly(piece.samples, job), best, voice)
        return _placed(best, piece, job) if is_speech(best, voice) else None

    def _heard_briefly(
        self, piece: AudioSegment, best: Decoding, fault: Fault, voice: Voice, job: _Job
    ) -> Decoding | None:
        """What is believed where ``best`` has a fault and there is no time for a thorough run."""
        if fault is Fault.TOO_LITTLE and piece.duration_s >= _MIN_SPLIT_S:
            halves = self._recognise_halves(piece, job, 1)  # it has stopped at a pause
            if halves is not None and halves.num_tokens > best.num_tokens:
                return halves
        return _placed(best, piece, job) if is_speech(best, voice) else None

    def _recognise_halves(self, piece: AudioSegment, job: _Job, num_splits: int) -> Decoding | None:
        """As above for audio whose text loops: it rarely does in shorter pieces."""
        heard: list[Decoding] = []
        for half in piece.halves():
            voice = Voice.measure(half.probabilities)
            if voice.is_absent:
                continue
            features = self._decoder.features(half.samples)
            decoding = self._decode(features, _short_frames(features.shape[1]), job)
            is_loop = find_fault(decoding, voice) is Fault.LOOP
            if is_loop and num_splits > 1 and half.duration_s >= _MIN_SPLIT_S:
                parts = self._recognise_halves(half, job, num_splits - 1)
                heard.extend([] if parts is None else [parts])
                continue
            if is_loop:
                decoding = better(self._decode(features, _LONG_FRAMES, job), decoding, voice)
            if is_speech(decoding, voice):
                heard.append(_placed(decoding, half, job))
        return _join(heard) if heard else None

    def _decode_thoroughly(self, samples: Samples, job: _Job) -> Decoding:
        assert job.language is not None, "known since the first run"
        job.num_runs += 1
        job.encoder_frames += MAX_FRAMES
        return self._decoder.decode_thoroughly(samples, job.language, job.prompt)

    def _decode(self, features: Samples, num_frames: int, job: _Job) -> Decoding:
        job.num_runs += 1
        job.encoder_frames += num_frames
        decoding, job.language = self._decoder.decode(
            features, num_frames, job.language, job.prompt, job.is_wanted
        )
        return decoding


def _placed(decoding: Decoding, piece: AudioSegment, job: _Job) -> Decoding:
    """``decoding`` with the place where it was heard; what it was decoded from is let go."""
    assert job.language is not None, "known since the first run"
    sound = decoding.sound if job.keeps_sound else None
    part = HeardPart(piece, decoding.text, job.language, sound)
    return replace(decoding, sound=None, parts=(part,))


def _short_frames(content_frames: int) -> int:
    """Context for the first run: even, at least 10 s, longer for longer audio."""
    least = _SHORT_FRAMES if content_frames <= _SHORT_MAX_CONTENT_FRAMES else _LONG_FRAMES
    return min(MAX_FRAMES, max(least, content_frames + _PAD_FRAMES) // 2 * 2)


def _agree(one: Decoding, other: Decoding, voice: Voice) -> bool:
    """Two contexts with the same words: the repetition or the doubt was none.

    Not so when text seems missing (Whisper likes to stop at a pause, whatever the context), nor
    for more words than the voice has room for.
    """
    if words_of(one.text) != words_of(other.text) or find_fault(other, voice) is Fault.TOO_LITTLE:
        return False
    return not other.was_capped and has_room(other, voice)


def _join(parts: Sequence[Decoding]) -> Decoding:
    """Consecutive pieces as one; scores are means over the tokens."""
    num_tokens = sum(part.num_tokens for part in parts)
    text = " ".join(part.text for part in parts)

    def mean(values: Sequence[float]) -> float:
        weighted = sum(v * p.num_tokens for v, p in zip(values, parts, strict=True))
        return weighted / num_tokens

    return Decoding(
        text=text,
        num_tokens=num_tokens,
        avg_logprob=mean([part.avg_logprob for part in parts]) if num_tokens else 0.0,
        no_speech_prob=mean([part.no_speech_prob for part in parts]) if num_tokens else 1.0,
        compression_ratio=compression_ratio(text),
        encoder_frames=sum(part.encoder_frames for part in parts),
        was_capped=any(part.was_capped for part in parts),
        end_marks=parts[-1].end_marks if parts else None,
        tail=parts[-1].tail if parts else None,
        parts=tuple(place for part in parts for place in part.parts),
    )


def _usable_prompt(prompt: str | None) -> str | None:
    """The end of a prompt: Whisper takes 223 tokens, and looking for loops costs their square."""
    end = (prompt or "")[-_MAX_PROMPT_CHARS:]
    return None if not end or has_loop(end) else end
