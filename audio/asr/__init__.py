"""Speech recognition with Whisper."""

from audio.asr.hallucination_filter import PunctuationLogprobs, words_of
from audio.asr.local_agreement import Agreement, rest_after
from audio.asr.recognizer import Recognizer, Transcript
from audio.asr.segmentation import AudioSegment
from audio.asr.word_timing import UNSPACED, WordTime

__all__ = [
    "Agreement",
    "PunctuationLogprobs",
    "AudioSegment",
    "Recognizer",
    "Transcript",
    "UNSPACED",
    "WordTime",
    "rest_after",
    "words_of",
]
