"""Audio files: reading, encoding while streaming, captions."""

from audio.files.captions import Line, lines_of, to_srt, to_vtt
from audio.files.containers import read_speech
from audio.files.encoders import MEDIA_TYPES, FileFormat, make_encoder
from audio.files.reader import read_audio

__all__ = [
    "FileFormat",
    "Line",
    "MEDIA_TYPES",
    "lines_of",
    "make_encoder",
    "read_audio",
    "read_speech",
    "to_srt",
    "to_vtt",
]
