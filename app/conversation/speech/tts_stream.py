"""Streaming speech synthesis of one response: clauses in, audio at the client's rate out.

While the caller has little audio buffered, a clause comes in several segments, so that its first
sound does not wait for its last word; otherwise in long ones, which cost less.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from functools import partial

from app.clock import Clock
from app.conversation.services import Services
from app.conversation.session_config import SessionConfig
from app.errors import SynthesisError
from app.observe import TurnTrace
from audio.errors import AudioError
from audio.frame import Samples
from audio.resample import StreamResampler
from audio.tts import SpeechPiece

# With this much buffered, latency does not matter.
_COMFORTABLE_BUFFER_S = 1.5


@dataclass(frozen=True, slots=True)
class SpeechSegment:
    """Part of a clause: samples float32 [n] at the client's rate.

    ``clause_len``: samples of the whole clause, an estimate until ``is_last``.
    """

    samples: Samples
    clause_len: int
    is_last: bool


class TtsStream:
    """One audio stream a message: ``synthesize_clause`` in order, then ``flush``.

    ``trace`` None: batch synthesis, with a lower priority than turns.
    """

    def __init__(
        self,
        services: Services,
        config: SessionConfig,
        clock: Clock,
        trace: TurnTrace | None,
    ) -> None:
        self._services = services
        self._clock = clock
        self._trace = trace
        self._config = config
        self._resampler = self._new_resampler()

    async def synthesize_clause(
        self, text: str, in_hand_s: float
    ) -> AsyncGenerator[SpeechSegment, None]:
        """Synthesize a clause. ``in_hand_s``: audio that the caller still has buffered.

        Raises SynthesisError.
        """
        pieces = self._services.synthesizer.stream(
            text, speed=self._config.speed, is_urgent=in_hand_s < _COMFORTABLE_BUFFER_S
        )
        rate = self._config.output_format.rate / self._services.synthesizer.sample_rate
        begun_ns = self._clock.now_ns()
        needed_ns = begun_ns + round(in_hand_s * 1e9)
        run = partial(self._services.speaking.run, is_live=self._trace is not None)
        piece = await run(partial(self._synthesize_first, text, pieces), needed_ns)
        if self._trace is not None:
            self._trace.note_clause_spoken(self._clock.now_ns() - begun_ns)
        made_len = 0
        while True:
            samples = self._resampler.process(piece.samples)
            made_len += len(samples)
            clause_len = max(made_len, round(piece.total_len * rate))
            yield SpeechSegment(samples, made_len if piece.is_last else clause_len, piece.is_last)
            if piece.is_last:
                return
            begun_ns = self._clock.now_ns()
            made_ns = made_len * 1_000_000_000 // self._config.output_format.rate
            piece = await run(partial(self._synthesize_next, pieces), needed_ns + made_ns)
            if self._trace is not None:
                self._trace.note_more_spoken(self._clock.now_ns() - begun_ns)

    def flush(self) -> Samples:
        """The rest of the message's audio from the resampler, which is reset."""
        rest = self._resampler.flush()
        self._resampler = self._new_resampler()
        return rest

    def _new_resampler(self) -> StreamResampler:
        return StreamResampler(
            self._services.synthesizer.sample_rate, self._config.output_format.rate
        )

    def _synthesize_first(self, text: str, pieces: Iterator[SpeechPiece]) -> SpeechPiece:
        """The first piece of ``text``, by far the most expensive. Runs in a worker thread."""
        return self._synthesize_next(pieces)

    def _synthesize_next(self, pieces: Iterator[SpeechPiece]) -> SpeechPiece:
        """A further piece. Runs in a worker thread, one call at a time."""
        try:
            return next(pieces)
        except AudioError as error:
            raise SynthesisError(f"speech synthesis failed: {error}") from error
