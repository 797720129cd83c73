"""Speech synthesis with Piper voices (VITS), streamed."""

from audio.tts.synthesizer import MAX_SPEED, MIN_SPEED, SpeechPiece, Synthesizer

__all__ = [
    "MAX_SPEED",
    "MIN_SPEED",
    "SpeechPiece",
    "Synthesizer",
]
