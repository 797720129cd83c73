"""A recording in words, a piece at a time, behind everything that callers wait for.

Each piece is a job of its own in the recogniser's queue, so that files take turns, and it is short:
who speaks waits for no more than the step of it that is being computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from app.conversation.speech.asr_scheduler import AsrScheduler, Urgency
from audio.asr import AudioSegment, WordTime
from audio.frame import SPEECH_RATE, Samples
from audio.vad import WINDOW_SAMPLES, VadModel

# With tiny.en word errors are as many as without cuts, or fewer (docs/adr/README.md); longer pieces
# take steps for which a caller would have to wait longer.
_PIECE_S = 8.0


@dataclass(frozen=True, slots=True)
class Dictated:
    """What was said in a piece of a recording, from ``start_s`` to ``end_s`` of it.

    ``words``: their times in the recording; () unless they were asked for. ``language`` None:
    nothing was said. The scores are those of ``audio.asr.recognizer.Transcript``.
    """

    start_s: float
    end_s: float
    text: str
    language: str | None
    words: tuple[WordTime, ...]
    avg_logprob: float
    no_speech_prob: float
    compression_ratio: float


async def dictate(
    recognition: AsrScheduler,
    vad: VadModel,
    samples: Samples,
    *,
    prompt: str | None = None,
    language: str | None = None,
    wants_words: bool = False,
) -> AsyncGenerator[Dictated, None]:
    """The pieces of ``samples`` float32 [n] at 16 kHz, in order, as they are understood.

    ``language`` None: that of the first words. Raises RecognitionError.
    """
    at = 0
    while at < len(samples):
        piece = await asyncio.to_thread(_next_piece, vad, samples, at)
        heard = await recognition.submit(
            piece.samples,
            Urgency.FILE,
            prompt=prompt,
            language=language,
            keeps_sound=wants_words,
        ).result
        words: tuple[WordTime, ...] = ()
        start_s = at / SPEECH_RATE
        if wants_words and heard.text:
            found = await recognition.locate(heard, Urgency.FILE).result
            words = tuple(
                replace(word, start_s=start_s + word.start_s, end_s=start_s + word.end_s)
                for word in found
            )
        spoken = heard.parts[0].language if heard.parts else None
        language = language or spoken
        at += piece.num_samples
        yield Dictated(
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
    """What begins at sample ``at``; cut at a pause, if there is much more."""
    # One window more than a piece may have: else it would not be cut.
    rest = samples[at : at + int(_PIECE_S * SPEECH_RATE) + WINDOW_SAMPLES]
    return AudioSegment(rest, vad.probabilities(rest)).parts(_PIECE_S)[0]
