"""Voice activity detection: streaming Silero VAD.

The ONNX file is the one that faster-whisper ships (Silero v6, MIT). It takes windows of 512 samples
at 16 kHz (32 ms) with the 64 samples before them, and carries an LSTM state between windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from faster_whisper.utils import get_assets_path

from audio.errors import ModelError
from audio.frame import Samples, silence
from audio.onnx_session import ORT_ERRORS, open_file

WINDOW_SAMPLES = 512
"""Samples per window."""
CONTEXT_SAMPLES = 64
STATE_LEN = 128


@dataclass(frozen=True, slots=True)
class VadWindows:
    """Speech probabilities float32 [m] of consecutive windows that cover a piece of audio.

    ``lead``, in [0, 512): samples of the first window that lie before the audio, where the audio
    was cut from a stream inside a window. The last window may reach beyond the audio's end.
    """

    probabilities: Samples
    lead: int = 0

    @property
    def num_windows(self) -> int:
        """Number of windows."""
        return self.probabilities.size

    def start_of(self, window: int) -> int:
        """Sample of the audio at which ``window`` begins; 0 for one that begins before it."""
        return max(0, window * WINDOW_SAMPLES - self.lead)

    def cut(self, start: int, end: int) -> VadWindows:
        """The windows [start, end)."""
        return VadWindows(self.probabilities[start:end], self.lead if start == 0 else 0)

    def fit(self, num_samples: int) -> VadWindows:
        """As many windows as ``num_samples`` of audio take up.

        Windows at the end that a stream has not completed yet get the last known probability.
        """
        missing = -(-(self.lead + num_samples) // WINDOW_SAMPLES) - self.num_windows
        if missing <= 0:
            return VadWindows(self.probabilities[: self.num_windows + missing], self.lead)
        last = self.probabilities[-1:] if self.num_windows else silence(1)
        return VadWindows(np.append(self.probabilities, np.repeat(last, missing)), self.lead)


class VadModel:
    """The Silero network; thread-safe, shared by all callers."""

    def __init__(self, path: Path | None = None) -> None:
        """Load faster-whisper's file, or ``path``. Raises ModelError when that fails."""
        # The arena would keep the memory of a whole recording, which streams never need.
        self._session = open_file(
            path or bundled_model_path(), 1, "the voice activity model", keeps_memory=False
        )

    def run(self, window: Samples, h: Samples, c: Samples) -> tuple[float, Samples, Samples]:
        """Speech probability of ``window`` [1, 64 + 512] and the next states h and c [1, 1, 128].

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
        """Probabilities of all windows of a recording [n] in one run: float32 [ceil(n / 512)].

        Equals a VadStream over the same samples with the last window zero-padded, and is several
        times faster. Raises ModelError when the runtime fails.
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
    """Streaming VAD of one caller: the network's state, and the samples of the open window."""

    def __init__(self, model: VadModel) -> None:
        self._model = model
        self.reset()

    def reset(self) -> None:
        """Clear all state; the next sample is sample 0 of a new stream."""
        self.num_samples_seen = 0
        self._rest = silence(0)
        self._input = np.zeros((1, CONTEXT_SAMPLES + WINDOW_SAMPLES), dtype=np.float32)
        self._h = np.zeros((1, 1, STATE_LEN), dtype=np.float32)
        self._c = np.zeros((1, 1, STATE_LEN), dtype=np.float32)

    def copy(self) -> VadStream:
        """An independent stream in the same state."""
        other = VadStream(self._model)
        other.num_samples_seen = self.num_samples_seen
        other._rest, other._input = self._rest.copy(), self._input.copy()
        other._h, other._c = self._h, self._c  # replaced, never changed
        return other

    @property
    def num_samples_scored(self) -> int:
        """Start of the open window: ``num_samples_seen`` less the samples in it."""
        return self.num_samples_seen - self._rest.size

    def detect(self, samples: Samples) -> list[float]:
        """Take float32 [n] at 16 kHz; return the probability in [0, 1] of each completed window.

        Window ``i`` of the stream is [512 * i, 512 * (i + 1)). A window takes about 0.2 ms.
        """
        self.num_samples_seen += samples.size
        pending = np.concatenate((self._rest, samples))
        num_windows = pending.size // WINDOW_SAMPLES
        end = num_windows * WINDOW_SAMPLES
        # A copy, so that a view does not keep a caller's large buffer alive.
        self._rest = pending[end:].copy()
        return [self._score(window) for window in pending[:end].reshape(-1, WINDOW_SAMPLES)]

    def _score(self, window: Samples) -> float:
        self._input[0, :CONTEXT_SAMPLES] = self._input[0, -CONTEXT_SAMPLES:]
        self._input[0, CONTEXT_SAMPLES:] = window
        probability, self._h, self._c = self._model.run(self._input, self._h, self._c)
        return probability


def bundled_model_path() -> Path:
    """The Silero file inside the installed faster-whisper. Raises ModelError when it is missing."""
    files = sorted(Path(get_assets_path()).glob("silero_vad*.onnx"))
    if not files:
        raise ModelError(f"faster-whisper has no silero_vad*.onnx in {get_assets_path()}")
    return files[-1]
