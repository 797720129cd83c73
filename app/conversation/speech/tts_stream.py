"""The voice of one answer: pieces of text in, pieces of sound at the client's rate out.

A clause comes in several pieces while the caller has little to hear, so that the first sound does
not wait for the last word; else in one, which costs less.
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

# With so much to hear there is no hurry.
_ENOUGH_S = 1.5


@dataclass(frozen=True, slots=True)
class SpeechSegment:
    """Part of a clause: samples float32 [n] at the client's rate.

    ``clause_len``: samples of the whole clause, as far as it is known; exact with ``is_last``.
    """

    samples: Samples
    clause_len: int
    is_last: bool


class TtsStream:
    """One stream of sound a message: ``say`` its clauses in order, then ``flush``.

    ``trace`` None: it is no turn's, and comes behind those that are.
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

    async def say(self, text: str, in_hand_s: float) -> AsyncGenerator[SpeechSegment, None]:
        """The sound of a clause; ``in_hand_s``: what the caller has to hear before it.

        Raises SynthesisError.
        """
        pieces = self._services.synthesizer.stream(
            text, speed=self._config.speed, is_urgent=in_hand_s < _ENOUGH_S
        )
        rate = self._config.output_format.rate / self._services.synthesizer.sample_rate
        begun_ns = self._clock.now_ns()
        needed_ns = begun_ns + round(in_hand_s * 1e9)
        run = partial(self._services.speaking.run, is_live=self._trace is not None)
        piece = await run(partial(self._synthesize, text, pieces), needed_ns)
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
            piece = await run(partial(self._go_on, pieces), needed_ns + made_ns)
            if self._trace is not None:
                self._trace.note_more_spoken(self._clock.now_ns() - begun_ns)

    def flush(self) -> Samples:
        """The rest of the message's sound; the next one is a stream of its own."""
        rest = self._resampler.flush()
        self._resampler = self._new_resampler()
        return rest

    def _new_resampler(self) -> StreamResampler:
        return StreamResampler(
            self._services.synthesizer.sample_rate, self._config.output_format.rate
        )

    def _synthesize(self, text: str, pieces: Iterator[SpeechPiece]) -> SpeechPiece:
        """Runs in a worker thread, as does the next one: one piece of this answer at a time."""
        return self._go_on(pieces)

    def _go_on(self, pieces: Iterator[SpeechPiece]) -> SpeechPiece:
        try:
            return next(pieces)
        except AudioError as error:
            raise SynthesisError(f"speech synthesis failed: {error}") from error
