"""A transcribed file in the forms that clients may ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from app.api.audio.transcription_request import TranscriptionRequest
from app.conversation import TranscribedPiece
from audio.asr import UNSPACED
from audio.files import CaptionLine, split_into_lines, to_srt, to_vtt

Wire = dict[str, Any]


def text_of(pieces: Sequence[TranscribedPiece]) -> str:
    """All that was said."""
    return _joint(pieces).join(piece.text for piece in pieces if piece.text)


def language_of(pieces: Sequence[TranscribedPiece]) -> str | None:
    """That of the first words; None: there are none."""
    return next((piece.language for piece in pieces if piece.language), None)


def usage_of(duration_s: float) -> Wire:
    """What was worked on, in seconds that have begun."""
    return {"type": "duration", "seconds": math.ceil(duration_s)}


def rendered(
    request: TranscriptionRequest, pieces: Sequence[TranscribedPiece]
) -> tuple[bytes, str]:
    """The body of an answer and its media type."""
    match request.response_format:
        case "text":
            return f"{text_of(pieces)}\n".encode(), "text/plain; charset=utf-8"
        case "srt":
            return to_srt(_lines(pieces)).encode(), "text/plain; charset=utf-8"
        case "vtt":
            return to_vtt(_lines(pieces)).encode(), "text/vtt; charset=utf-8"
        case "verbose_json":
            return msgspec.json.encode(_verbose(request, pieces)), "application/json"
        case "json":
            duration_s = pieces[-1].end_s if pieces else 0.0
            whole = {"text": text_of(pieces), "usage": usage_of(duration_s)}
            return msgspec.json.encode(whole), "application/json"


def _verbose(request: TranscriptionRequest, pieces: Sequence[TranscribedPiece]) -> Wire:
    duration_s = pieces[-1].end_s if pieces else 0.0
    whole: Wire = {
        "task": "transcribe",
        "language": language_of(pieces) or request.language or "",
        "duration": round(duration_s, 3),
        "text": text_of(pieces),
        "usage": usage_of(duration_s),
    }
    if request.wants_lines:
        told = [(piece, line) for piece in pieces for line in _lines([piece])]
        whole["segments"] = [_segment(number, *one) for number, one in enumerate(told)]
    if request.wants_words:
        whole["words"] = [
            {"word": word.word, "start": round(word.start_s, 3), "end": round(word.end_s, 3)}
            for piece in pieces
            for word in piece.words
        ]
    return whole


def _segment(number: int, piece: TranscribedPiece, line: CaptionLine) -> Wire:
    """Its scores are those of the piece of the file that was recognised at once."""
    return {
        "id": number,
        "seek": round(piece.start_s * 100),
        "start": round(line.start_s, 3),
        "end": round(line.end_s, 3),
        "text": line.text,
        "tokens": line.tokens,
        "temperature": 0.0,
        "avg_logprob": piece.avg_logprob,
        "compression_ratio": piece.compression_ratio,
        "no_speech_prob": piece.no_speech_prob,
    }


def _lines(pieces: Sequence[TranscribedPiece]) -> list[CaptionLine]:
    words = [word for piece in pieces for word in piece.words]
    return split_into_lines(words, joint=_joint(pieces))


def _joint(pieces: Sequence[TranscribedPiece]) -> str:
    return "" if language_of(pieces) in UNSPACED else " "
