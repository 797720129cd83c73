"""Is this transcript what was said? Pure judgements on a decoding and on the voice in its audio.

Whisper always answers: silence gives "Thank you.", noise gives stories, a repeated phrase or a
short context can send it into a loop. Its own scores are not enough (a single spoken "two" scores
worse than invented text over hold music), so they are read together with the voice activity.
Numbers in the comments are from tiny.en on our recordings (90 of speech, 14 of noise).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from audio.asr.word_timing import EncoderOutput, HeardPart
from audio.frame import SPEECH_RATE, Samples
from audio.vad import WINDOW_SAMPLES

_WINDOW_S = WINDOW_SAMPLES / SPEECH_RATE

# Peak of the voice probability: noise without any voice 0.02 to 0.44, faint or odd noises 0.66 and
# 0.69, speech over a poor codec 0.58 and 0.68, all other speech 0.97 and more.
_NO_VOICE_PEAK = 0.35
_CLEAR_VOICE_PEAK = 0.8
_VOICED = 0.5

# Average log-probability: invented over noise that holds some voice -1.64 to -0.82, over a crowd in
# a wrongly detected language -1.32. Clear speech in loud noise goes down to -0.83 and a lone word
# to -0.88 (synthetic ones to -1.51), speech over a poor codec to -0.59. Whisper's own probability
# that nobody speaks is 0.60 over the crowd, at most 0.44 for the lone words below -0.88.
_MIN_LOGPROB_CLEAR_VOICE = -2.0
_MIN_LOGPROB_CLEAR_VOICE_NO_SPEECH = -1.2
_MIN_LOGPROB = -0.75
_UNSURE_LOGPROB = -1.0
_NO_SPEECH = 0.5

# Text tokens per voiced second: slow digits 1.8, usual speech 3 to 7, languages of another script
# about twice that. Short runs of voice are measured short, hence the allowance.
_MIN_TOKENS_PER_S = 0.5
_FEW_TOKENS_PER_S = 1.5
_MAX_TOKENS_PER_S = 12.0
_ROOM_TOKENS_PER_S = 8.0
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
class Voice:
    """How much voice a stretch of audio holds: highest probability, seconds at 0.5 or more."""

    peak: float
    voiced_s: float

    @classmethod
    def measure(cls, probabilities: Samples) -> Voice:
        """From the voice probabilities [n] of consecutive windows."""
        if probabilities.size == 0:
            return cls(0.0, 0.0)
        num_voiced = int((probabilities >= _VOICED).sum())
        return cls(float(probabilities.max()), num_voiced * _WINDOW_S)

    @property
    def is_absent(self) -> bool:
        """Nothing here can be speech; do not even ask the recogniser."""
        return self.peak < _NO_VOICE_PEAK


@dataclass(frozen=True, slots=True)
class PunctuationLogprobs:
    """What the recogniser expects behind the last word, having heard how it sounds: natural
    log-probabilities of each mark, and of nothing more."""

    period: float
    question: float
    exclamation: float
    comma: float
    ellipsis: float
    nothing: float


@dataclass(frozen=True, slots=True)
class Decoding:
    """One run of the recogniser. ``was_capped``: it was still talking at the token limit.

    ``end_marks``, ``tail`` (see asr_tail): None where they are not known. ``sound``: what was
    decoded, None where it is not at hand. ``parts``: the pieces of audio that were heard so.
    """

    text: str
    num_tokens: int
    avg_logprob: float
    no_speech_prob: float
    compression_ratio: float
    encoder_frames: int
    was_capped: bool
    end_marks: PunctuationLogprobs | None = None
    tail: Samples | None = None
    sound: EncoderOutput | None = None
    parts: tuple[HeardPart, ...] = ()


class Fault(Enum):
    """Why a decoding should be tried again in another way."""

    LOOP = "loop"
    TOO_LITTLE = "too little text for the voice"
    UNSURE = "unsure"


def is_speech(decoding: Decoding, voice: Voice) -> bool:
    """False for what was invented over noise; then nothing was said."""
    words = words_of(decoding.text)
    if not words or voice.is_absent:
        return False
    max_tokens = _TOKEN_ALLOWANCE + _MAX_TOKENS_PER_S * voice.voiced_s
    is_plausible = _MIN_TOKENS_PER_S * voice.voiced_s <= decoding.num_tokens <= max_tokens
    if voice.peak >= _CLEAR_VOICE_PEAK and is_plausible:
        if decoding.no_speech_prob > _NO_SPEECH:
            return decoding.avg_logprob >= _MIN_LOGPROB_CLEAR_VOICE_NO_SPEECH
        return decoding.avg_logprob >= _MIN_LOGPROB_CLEAR_VOICE
    if " ".join(words) in _STOCK_PHRASES:
        return decoding.avg_logprob >= _MIN_LOGPROB_STOCK_PHRASE
    return decoding.avg_logprob >= _MIN_LOGPROB


def find_fault(decoding: Decoding, voice: Voice) -> Fault | None:
    """What speaks against the decoding, None when nothing does."""
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
    if decoding.avg_logprob < _UNSURE_LOGPROB:
        return Fault.UNSURE
    return None


def has_room(decoding: Decoding, voice: Voice) -> bool:
    """Whether the voice lasts long enough for the text at a usual pace."""
    return decoding.num_tokens <= _TOKEN_ALLOWANCE + _ROOM_TOKENS_PER_S * voice.voiced_s


def has_loop(text: str) -> bool:
    """Whether a phrase is repeated at once more often than people do.

    Five times for one word, three times for two, twice for three or more, and twice for any phrase
    that is all there is. People do say such things ("bye bye"); it only means that a second look is
    worth its time.
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


def better(one: Decoding, other: Decoding, voice: Voice) -> Decoding:
    """The more believable of two decodings of the same audio; the first when they are equal."""
    badness = {None: 0, Fault.UNSURE: 1, Fault.TOO_LITTLE: 2, Fault.LOOP: 3}

    def rank(decoding: Decoding) -> tuple[int, float]:
        fault = find_fault(decoding, voice)
        # A loop is the surer of itself the longer it runs; the shorter one is nearer the truth.
        doubt = decoding.num_tokens if fault is Fault.LOOP else -decoding.avg_logprob
        return badness[fault], doubt

    return min(one, other, key=rank)


def words_of(text: str) -> list[str]:
    """Lower-case words, apostrophes kept; characters of scripts without spaces are runs."""
    return re.findall(r"[^\W_]+(?:'[^\W_]+)*", text.lower())
