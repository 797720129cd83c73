"""Batch transcription: a recording is cut into short pieces, transcribed with the lowest priority.

Each piece is a job of its own in the recogniser's queue, so that files take turns; pieces are short
so that a caller waits for no more than one step of the running one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from app.conversation.speech.asr_scheduler import AsrPriority, AsrScheduler
from audio.asr import AudioSegment, WordTime
from audio.frame import SPEECH_RATE, Samples
from audio.vad import WINDOW_SAMPLES, VadModel, VadWindows

# With tiny.en no more word errors than without cuts (docs/adr/README.md); steps of longer pieces
# would delay callers more.
_PIECE_S = 8.0


@dataclass(frozen=True, slots=True)
class TranscribedPiece:
    """Transcript of a recording from ``start_s`` to ``end_s``.

    ``words``: timestamps in the recording; () unless asked for. ``language`` None: no speech. The
    scores are those of ``audio.asr.Transcript``.
    """

    start_s: float
    end_s: float
    text: str
    language: str | None
    words: tuple[WordTime, ...]
    avg_logprob: float
    no_speech_prob: float
    compression_ratio: float


async def transcribe_recording(
    recognition: AsrScheduler,
    vad: VadModel,
    samples: Samples,
    *,
    prompt: str | None = None,
    language: str | None = None,
    wants_words: bool = False,
) -> AsyncGenerator[TranscribedPiece, None]:
    """Transcribe ``samples`` float32 [n] at 16 kHz; yields the pieces in order.

    ``language`` None: detected from the first speech. Raises RecognitionError.
    """
    at = 0
    while at < len(samples):
        piece = await asyncio.to_thread(_next_piece, vad, samples, at)
        heard = await recognition.submit(
            piece.samples,
            AsrPriority.FILE,
            windows=piece.windows,
            prompt=prompt,
            language=language,
            keep_encoder_output=wants_words,
        ).result
        words: tuple[WordTime, ...] = ()
        start_s = at / SPEECH_RATE
        if wants_words and heard.text:
            found = await recognition.align_words(heard, AsrPriority.FILE).result
            words = tuple(
                replace(word, start_s=start_s + word.start_s, end_s=start_s + word.end_s)
                for word in found
            )
        spoken = heard.segments[0].language if heard.segments else None
        language = language or spoken
        at += piece.num_samples
        yield TranscribedPiece(
            start_s=start_s,
            end_s=at / SPEECH_RATE,
            text=heard.text,
            language=spoken,
            words=words,
            avg_logprob=heard.avg_logprob,
            no_speech_prob=heard.no_speech_prob,
            compression_ratio=heard.compression_ratio,
        )


def _next_piece(vad: VadModel, samples: Samples, at: int) -> AudioSegment:
    """The piece that begins at sample ``at``, cut at a pause if the recording goes on."""
    # One window more than a piece may have, so that it is cut.
    rest = samples[at : at + int(_PIECE_S * SPEECH_RATE) + WINDOW_SAMPLES]
    return AudioSegment(rest, VadWindows(vad.probabilities(rest))).split_at_pauses(_PIECE_S)[0]
