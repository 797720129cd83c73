"""Hallucination filter: accepts or rejects a Whisper decoding, given the voice activity.

Whisper always returns text: "Thank you." for silence, invented sentences for noise, and repetition
loops for a repeated phrase or a short context. Its own scores are not enough (a single spoken "two"
scores worse than invented text over hold music), so they are combined with the VAD's.
Figures in the comments are from tiny.en on our recordings (90 of speech, 14 of noise).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from audio.asr.word_timing import EncoderOutput, TranscribedSegment
from audio.frame import SPEECH_RATE, Samples
from audio.vad import WINDOW_SAMPLES

_WINDOW_S = WINDOW_SAMPLES / SPEECH_RATE

# Peak speech probability: noise without any voice 0.02 to 0.44, faint or odd noises 0.66 and 0.69,
# speech over a poor codec 0.58 and 0.68, all other speech 0.97 and more.
_NO_SPEECH_PEAK = 0.35
_CLEAR_SPEECH_PEAK = 0.8
_VOICED_FROM = 0.5

# Average log-probability: invented over noise that holds some voice -1.64 to -0.82, over a crowd in
# a wrongly detected language -1.32. Clear speech in loud noise goes down to -0.83 and a lone word
# to -0.88 (synthetic ones to -1.51), speech over a poor codec to -0.59. Whisper's own probability
# of no speech is 0.60 over the crowd, at most 0.44 for the lone words below -0.88.
_MIN_LOGPROB_CLEAR_SPEECH = -2.0
_MIN_LOGPROB_CLEAR_SPEECH_NO_SPEECH = -1.2
_MIN_LOGPROB = -0.75
_LOW_CONFIDENCE_LOGPROB = -1.0
_NO_SPEECH = 0.5

# Text tokens per voiced second: slow digits 1.8, usual speech 3 to 7, languages of another script
# about twice that. Short runs of voice are measured short, hence the allowance.
_MIN_TOKENS_PER_S = 0.5
_FEW_TOKENS_PER_S = 1.5
_MAX_TOKENS_PER_S = 12.0
_FITTING_TOKENS_PER_S = 8.0
_TOKEN_ALLOWANCE = 4
_FEW_TOKENS_MIN_VOICED_S = 1.5

_MAX_COMPRESSION_RATIO = 2.4  # OpenAI's threshold for "too repetitive"
_MIN_LOGPROB_STOCK_PHRASE = -0.5
_STOCK_PHRASES = frozenset(
    {
        "you",
        "thank you",
        "thank you very much",
        "thanks for watching",
        "thank you for watching",
        "thank you so much for watching",
        "please subscribe",
        "the end",
        "subtitles by the amara org community",
    }
)


@dataclass(frozen=True, slots=True)
class VoiceActivity:
    """Peak speech probability of a stretch of audio, and its seconds at 0.5 or more."""

    peak: float
    voiced_s: float

    @classmethod
    def measure(cls, probabilities: Samples) -> VoiceActivity:
        """From the probabilities [n] of consecutive VAD windows."""
        if probabilities.size == 0:
            return cls(0.0, 0.0)
        num_voiced = int((probabilities >= _VOICED_FROM).sum())
        return cls(float(probabilities.max()), num_voiced * _WINDOW_S)

    @property
    def is_absent(self) -> bool:
        """True when the audio cannot hold speech; decoding it would only invent text."""
        return self.peak < _NO_SPEECH_PEAK


@dataclass(frozen=True, slots=True)
class PunctuationLogprobs:
    """Natural log-probabilities of each mark after the last word, and of the end of the text."""

    period: float
    question: float
    exclamation: float
    comma: float
    ellipsis: float
    nothing: float


@dataclass(frozen=True, slots=True)
class Decoding:
    """Result of one decoding run. ``was_capped``: the token limit cut it off.

    ``punctuation``, ``pooled_features`` (see `audio.asr.turn_end_probe`), ``encoder_output``: None
    where not available. ``segments``: the audio that the text was decoded from.
    """

    text: str
    num_tokens: int
    avg_logprob: float
    no_speech_prob: float
    compression_ratio: float
    encoder_frames: int
    was_capped: bool
    punctuation: PunctuationLogprobs | None = None
    pooled_features: Samples | None = None
    encoder_output: EncoderOutput | None = None
    segments: tuple[TranscribedSegment, ...] = ()


class Fault(Enum):
    """Reason to decode again with other settings."""

    LOOP = "loop"
    TOO_LITTLE = "too little text for the speech"
    LOW_CONFIDENCE = "low confidence"


def is_plausible(decoding: Decoding, voice: VoiceActivity) -> bool:
    """False for text that was invented over noise."""
    words = words_of(decoding.text)
    if not words or voice.is_absent:
        return False
    max_tokens = _TOKEN_ALLOWANCE + _MAX_TOKENS_PER_S * voice.voiced_s
    has_speech_pace = _MIN_TOKENS_PER_S * voice.voiced_s <= decoding.num_tokens <= max_tokens
    if voice.peak >= _CLEAR_SPEECH_PEAK and has_speech_pace:
        if decoding.no_speech_prob > _NO_SPEECH:
            return decoding.avg_logprob >= _MIN_LOGPROB_CLEAR_SPEECH_NO_SPEECH
        return decoding.avg_logprob >= _MIN_LOGPROB_CLEAR_SPEECH
    if " ".join(words) in _STOCK_PHRASES:
        return decoding.avg_logprob >= _MIN_LOGPROB_STOCK_PHRASE
    return decoding.avg_logprob >= _MIN_LOGPROB


def find_fault(decoding: Decoding, voice: VoiceActivity) -> Fault | None:
    """The fault of a decoding that should be repeated; None when there is none."""
    if (
        decoding.was_capped
        or decoding.compression_ratio > _MAX_COMPRESSION_RATIO
        or has_loop(decoding.text)
    ):
        return Fault.LOOP
    if (
        voice.voiced_s >= _FEW_TOKENS_MIN_VOICED_S
        and decoding.num_tokens < _FEW_TOKENS_PER_S * voice.voiced_s
    ):
        return Fault.TOO_LITTLE
    if decoding.avg_logprob < _LOW_CONFIDENCE_LOGPROB:
        return Fault.LOW_CONFIDENCE
    return None


def fits_duration(decoding: Decoding, voice: VoiceActivity) -> bool:
    """True when the speech lasts long enough for the text at a usual pace."""
    return decoding.num_tokens <= _TOKEN_ALLOWANCE + _FITTING_TOKENS_PER_S * voice.voiced_s


def has_loop(text: str) -> bool:
    """True when a phrase repeats more often than people usually do.

    Five times for one word, three times for two, twice for three or more, and twice for any phrase
    that makes up the whole text. People do say such things ("bye bye"); a hit only means that a
    second decoding is worth its time.
    """
    words = words_of(text)
    for phrase_len in range(1, len(words) // 2 + 1):
        if words[phrase_len:] == words[:-phrase_len] and len(words) % phrase_len == 0:
            return True
        max_repeats = {1: 4, 2: 2}.get(phrase_len, 1)
        num_equal = 0  # consecutive words that equal the word one phrase earlier
        for word, earlier in zip(words[phrase_len:], words, strict=False):
            num_equal = num_equal + 1 if word == earlier else 0
            if num_equal >= max_repeats * phrase_len:
                return True
    return False


def more_plausible(one: Decoding, other: Decoding, voice: VoiceActivity) -> Decoding:
    """The more plausible of two decodings of the same audio; the first on a tie."""
    severity = {None: 0, Fault.LOW_CONFIDENCE: 1, Fault.TOO_LITTLE: 2, Fault.LOOP: 3}

    def rank(decoding: Decoding) -> tuple[int, float]:
        fault = find_fault(decoding, voice)
        # Confidence grows with the length of a loop, so of two loops the shorter is preferred.
        doubt = decoding.num_tokens if fault is Fault.LOOP else -decoding.avg_logprob
        return severity[fault], doubt

    return min(one, other, key=rank)


def words_of(text: str) -> list[str]:
    """Lower-case words with their apostrophes; in scripts without spaces, runs of characters."""
    return re.findall(r"[^\W_]+(?:'[^\W_]+)*", text.lower())
