"""Audio files: reading uploads and recordings, writing speech, captions."""

from audio.files.captions import CaptionLine, split_into_lines, to_srt, to_vtt
from audio.files.containers import read_speech
from audio.files.encoders import MEDIA_TYPES, FileFormat, make_encoder
from audio.files.reader import read_audio

__all__ = [
    "FileFormat",
    "CaptionLine",
    "MEDIA_TYPES",
    "split_into_lines",
    "make_encoder",
    "read_audio",
    "read_speech",
    "to_srt",
    "to_vtt",
]
