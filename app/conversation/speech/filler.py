"""Filler speech for slow responses, synthesized once so that it is ready at once."""

from __future__ import annotations

from numpy import concatenate

from audio.frame import Samples
from audio.resample import StreamResampler
from audio.tts import Synthesizer


class Filler:
    """The audio of ``text``; shared by all calls of a server."""

    def __init__(self, text: str, synthesizer: Synthesizer) -> None:
        """Synthesize ``text`` (blocking). Raises AudioError."""
        self.text = text
        self._rate = synthesizer.sample_rate
        self._samples = synthesizer.synthesize(text)
        self._resampled: dict[int, Samples] = {}

    def samples(self, rate: int) -> Samples:
        """The audio, float32 [n] at ``rate``."""
        found = self._resampled.get(rate)
        if found is None:
            resampler = StreamResampler(self._rate, rate)
            head, tail = resampler.process(self._samples), resampler.flush()
            found = self._resampled[rate] = concatenate((head, tail))
        return found
