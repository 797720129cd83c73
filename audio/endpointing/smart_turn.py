"""Acoustic end-of-turn model: smart-turn v3 (pipecat-ai/smart-turn, BSD-2-Clause).

An encoder like Whisper tiny's over the last 8 s and a classifier, in one ONNX file. Its input is
Whisper's log-mel spectrogram of the audio, normalised to mean 0 and variance 1; shorter audio is
padded with silence in front.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from faster_whisper.feature_extractor import FeatureExtractor

from audio.errors import ModelError
from audio.frame import SPEECH_RATE, Samples
from audio.onnx_session import ORT_ERRORS, open_file

WINDOW_S = 8
NUM_MELS, NUM_FRAMES = 80, WINDOW_S * 100
_LEN = WINDOW_S * SPEECH_RATE


class SmartTurnModel:
    """The ONNX network; thread-safe, shared by all callers."""

    def __init__(self, path: Path) -> None:
        """Load ``path``. Raises ModelError when it is not a smart-turn v3 model."""
        self._session = open_file(path, 1, "the turn model")
        inputs = self._session.get_inputs()
        shape = inputs[0].shape[1:] if len(inputs) == 1 else None
        if shape != [NUM_MELS, NUM_FRAMES]:
            raise ModelError(
                f"{path} is not a smart-turn v3 model: expected one input [n, {NUM_MELS}, "
                f"{NUM_FRAMES}], got {[(item.name, item.shape) for item in inputs]}"
            )
        self._input = inputs[0].name
        self._extractor = FeatureExtractor(feature_size=NUM_MELS, chunk_length=WINDOW_S)

    def warm_up(self) -> None:
        """Run once, so that the first caller does not pay for lazy set-up."""
        self.probability(np.zeros(SPEECH_RATE, np.float32))

    def probability(self, samples: Samples) -> float:
        """Probability in [0, 1] that the turn in ``samples`` float32 [n] at 16 kHz is over.

        Raises ModelError when the runtime fails.
        """
        try:
            (made, *_) = self._session.run(None, {self._input: self.features(samples)[None]})
        except ORT_ERRORS as error:
            raise ModelError(f"the turn model failed: {error}") from error
        value = float(np.asarray(made).reshape(-1)[0])
        if not 0.0 <= value <= 1.0:  # also refuses NaN
            raise ModelError(f"the turn model gave {value}, which is no probability")
        return value

    def features(self, samples: Samples) -> Samples:
        """Log-mel input of the network: float32 [80, 800]."""
        window = np.zeros(_LEN, np.float32)
        last = samples[-_LEN:]
        if len(last):
            window[-len(last) :] = last
        window = (window - window.mean()) / np.sqrt(window.var() + 1e-7)
        features: Samples = self._extractor(window.astype(np.float32), padding=0)[:, :NUM_FRAMES]
        return features.astype(np.float32)
