"""How likely is it that this moment holds a voice: Silero VAD, streaming.

The ONNX file is the one that faster-whisper ships (Silero v6, MIT). It sees windows of 512 samples
at 16 kHz (32 ms) with the 64 samples before them, and carries an LSTM state from window to window.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from faster_whisper.utils import get_assets_path

from audio.errors import ModelError
from audio.frame import Samples, silence
from audio.onnx_session import ORT_ERRORS, open_file

WINDOW_SAMPLES = 512
"""Samples per voice probability."""
CONTEXT_SAMPLES = 64
STATE_LEN = 128


class VadModel:
    """The network, shared by all callers; a run keeps nothing, so threads may share it too."""

    def __init__(self, path: Path | None = None) -> None:
        """Loads faster-whisper's file, or ``path``. Raises ModelError when that fails."""
        # A whole recording at once takes memory that no caller's windows need again.
        self._session = open_file(
            path or bundled_model_path(), 1, "the voice activity model", keeps_memory=False
        )

    def run(self, window: Samples, h: Samples, c: Samples) -> tuple[float, Samples, Samples]:
        """Probability of voice in ``window`` [1, 64 + 512] and the next state, h and c [1, 1, 128].

        Raises ModelError when the runtime fails.
        """
        probability, h, c = self._run(window, h, c)
        return float(probability.reshape(())), h, c

    def _run(self, windows: Samples, h: Samples, c: Samples) -> tuple[Samples, Samples, Samples]:
        try:
            probabilities, h, c = self._session.run(None, {"input": windows, "h": h, "c": c})
        except ORT_ERRORS as error:
            raise ModelError(f"voice activity detection failed: {error}") from error
        return probabilities, h, c

    def probabilities(self, samples: Samples) -> Samples:
        """All windows of a whole recording [n] at once: float32 [ceil(n / 512)].

        Equals VadStream fed with the same samples, the last window filled up with silence, and is
        several times faster. Raises ModelError when the runtime fails.
        """
        num_windows = -(-samples.size // WINDOW_SAMPLES)
        if num_windows == 0:
            return silence(0)
        padded = silence(CONTEXT_SAMPLES + num_windows * WINDOW_SAMPLES)
        padded[CONTEXT_SAMPLES : CONTEXT_SAMPLES + samples.size] = samples
        view = np.lib.stride_tricks.sliding_window_view(padded, CONTEXT_SAMPLES + WINDOW_SAMPLES)
        state = np.zeros((1, 1, STATE_LEN), dtype=np.float32)
        windows = np.ascontiguousarray(view[::WINDOW_SAMPLES])
        return self._run(windows, state, state)[0].reshape(-1)


class VadStream:
    """One caller's voice activity: the state of the network and the audio not yet looked at."""

    def __init__(self, model: VadModel) -> None:
        self._model = model
        self.reset()

    def reset(self) -> None:
        """Forgets everything; the next sample is sample 0 of a new stream."""
        self.num_samples_seen = 0
        self._rest = silence(0)
        self._input = np.zeros((1, CONTEXT_SAMPLES + WINDOW_SAMPLES), dtype=np.float32)
        self._h = np.zeros((1, 1, STATE_LEN), dtype=np.float32)
        self._c = np.zeros((1, 1, STATE_LEN), dtype=np.float32)

    def copy(self) -> VadStream:
        """Another stream that has seen the same."""
        other = VadStream(self._model)
        other.num_samples_seen = self.num_samples_seen
        other._rest, other._input = self._rest.copy(), self._input.copy()
        other._h, other._c = self._h, self._c  # replaced, never changed
        return other

    @property
    def num_samples_judged(self) -> int:
        """Where the next window begins: ``num_samples_seen`` less the samples that wait."""
        return self.num_samples_seen - self._rest.size

    def feed(self, samples: Samples) -> list[float]:
        """Takes audio float32 [n] at 16 kHz; one probability in [0, 1] per completed window.

        Window ``i`` of the stream is [512 * i, 512 * (i + 1)). A window takes about 0.2 ms.
        """
        self.num_samples_seen += samples.size
        pending = np.concatenate((self._rest, samples))
        num_windows = pending.size // WINDOW_SAMPLES
        end = num_windows * WINDOW_SAMPLES
        # A copy, so that a view does not keep a caller's large buffer alive.
        self._rest = pending[end:].copy()
        return [self._judge(window) for window in pending[:end].reshape(-1, WINDOW_SAMPLES)]

    def _judge(self, window: Samples) -> float:
        self._input[0, :CONTEXT_SAMPLES] = self._input[0, -CONTEXT_SAMPLES:]
        self._input[0, CONTEXT_SAMPLES:] = window
        probability, self._h, self._c = self._model.run(self._input, self._h, self._c)
        return probability


def bundled_model_path() -> Path:
    """The Silero file inside the installed faster-whisper. Raises ModelError when there is none."""
    files = sorted(Path(get_assets_path()).glob("silero_vad*.onnx"))
    if not files:
        raise ModelError(f"faster-whisper has no silero_vad*.onnx in {get_assets_path()}")
    return files[-1]
