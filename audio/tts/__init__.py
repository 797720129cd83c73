"""Speech synthesis with Piper (VITS) voices."""

from audio.tts.synthesizer import MAX_SPEED, MIN_SPEED, SpeechPiece, Synthesizer

__all__ = [
    "MAX_SPEED",
    "MIN_SPEED",
    "SpeechPiece",
    "Synthesizer",
]
