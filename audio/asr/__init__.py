"""Speech recognition: Whisper decoding, hallucination filter, partials, word timestamps."""

from audio.asr.hallucination_filter import PunctuationLogprobs, words_of
from audio.asr.local_agreement import LocalAgreement, text_after
from audio.asr.recognizer import Recognizer, Transcript
from audio.asr.segmentation import AudioSegment
from audio.asr.word_timing import UNSPACED, WordTime

__all__ = [
    "UNSPACED",
    "AudioSegment",
    "LocalAgreement",
    "PunctuationLogprobs",
    "Recognizer",
    "Transcript",
    "WordTime",
    "text_after",
    "words_of",
]
