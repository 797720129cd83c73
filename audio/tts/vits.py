"""Inference of a Piper voice: phoneme ids to samples, a few frames at a time.

    frames   decoded | halo | [start, end) now | halo | later

Measured on two busy cores of an AMD EPYC with en_US-joe-medium (compare, do not quote): of a clause
of six words (160 frames) the front takes 13 %, the flow 17 %, the decoder 70 %. Two threads cost 15
to 45 % more CPU and gain nothing while the other core has work. Graph optimisation (basic,
extended, all), arena, memory patterns and flush-to-zero make no difference beyond noise.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from audio.frame import Samples
from audio.onnx_session import open_session
from audio.tts.graph_split import split_voice

# Weight of a new measurement in the running mean of the cost per frame.
_COST_WEIGHT = 0.2


class VitsSession:
    """The three stages of the network; thread-safe, shared by all callers."""

    def __init__(self, path: Path, num_threads: int = 1) -> None:
        """Load ``path``. Raises ModelError when it is not a Piper voice."""
        parts = split_voice(path)
        self.hop_len = parts.hop_len
        """Samples per frame."""
        self.halo_len = parts.decoder.halo
        """Receptive field of the decoder in frames on each side."""
        self.decode_s = 0.001
        """Decoding time per frame, a running mean; it rises with the load of the machine."""
        self.flow_halo_len = parts.flow.halo
        """Receptive field of the flow in frames on each side."""
        what = f"the voice {path}"
        self._front = open_session(parts.front.model, num_threads, what)
        self._flow = open_session(parts.flow.model, num_threads, what)
        self._decoder = open_session(parts.decoder.model, num_threads, what)

    def open(self, phoneme_ids: list[int], scales: list[float], sid: int | None) -> Utterance:
        """Run the front on a sentence; its frames are not decoded yet.

        ``scales``: noise, length, duration noise. ``sid``: speaker id of a multi-speaker voice.
        Raises one of onnx_session.ORT_ERRORS.
        """
        feed: dict[str, NDArray[Any]] = {
            "input": np.array([phoneme_ids], np.int64),
            "input_lengths": np.array([len(phoneme_ids)], np.int64),
            "scales": np.array(scales, np.float32),
        }
        return Utterance(self, _run(self._front, feed | _speaker(sid)), sid)

    def latents(self, frames: Samples, sid: int | None) -> Samples:
        """Run the flow: frames float32 [1, channels, n] to latents of the same shape."""
        mask = np.ones((1, 1, frames.shape[2]), np.float32)
        names = [item.name for item in self._flow.get_inputs() if item.name != "sid"]
        return _run(self._flow, dict(zip(names, (frames, mask), strict=True)) | _speaker(sid))

    def samples(self, latents: Samples, sid: int | None) -> Samples:
        """Run the decoder: latents float32 [1, channels, n] to samples [n * hop_len]."""
        begun_s = time.perf_counter()
        (name,) = [item.name for item in self._decoder.get_inputs() if item.name != "sid"]
        made = _run(self._decoder, {name: latents} | _speaker(sid)).reshape(-1)
        cost_s = (time.perf_counter() - begun_s) / latents.shape[2]
        self.decode_s += _COST_WEIGHT * (cost_s - self.decode_s)
        return made


class Utterance:
    """Synthesis of one sentence. Not thread-safe."""

    def __init__(self, net: VitsSession, frames: Samples, sid: int | None) -> None:
        """``frames``: float32 [1, channels, n]."""
        self._net = net
        self._frames = frames
        self._sid = sid
        self._latents = frames[:, :, :0]
        self.num_frames: int = frames.shape[2]
        self.num_made = 0
        """Frames decoded so far."""

    @property
    def is_over(self) -> bool:
        """True when all frames are decoded."""
        return self.num_made >= self.num_frames

    def decode_frames(self, num_frames: int) -> Samples:
        """Decode the next ``num_frames``, or what is left: samples float32 [frames * hop_len].

        Equal to those of a run over the whole sentence. Raises one of onnx_session.ORT_ERRORS.
        """
        start, end = self.num_made, min(self.num_made + num_frames, self.num_frames)
        halo = self._net.halo_len
        first, last = max(0, start - halo), min(end + halo, self.num_frames)
        self._extend(last)
        samples = self._net.samples(self._latents[:, :, first:last], self._sid)
        self.num_made = end
        hop = self._net.hop_len
        return samples[(start - first) * hop : (end - first) * hop]

    def _extend(self, end: int) -> None:
        """Compute latents up to ``end`` at least."""
        known, halo = self._latents.shape[2], self._net.flow_halo_len
        if end <= known:
            return
        # A further run repeats 2 * halo frames: not worth it for a shorter remainder.
        if self.num_frames - end <= 2 * halo:
            end = self.num_frames
        first, last = max(0, known - halo), min(end + halo, self.num_frames)
        latents = self._net.latents(self._frames[:, :, first:last], self._sid)
        new = latents[:, :, known - first : end - first]
        self._latents = np.concatenate((self._latents, new), axis=2)


def _speaker(sid: int | None) -> dict[str, NDArray[Any]]:
    return {} if sid is None else {"sid": np.array([sid], np.int64)}


def _run(session: ort.InferenceSession, feed: dict[str, NDArray[Any]]) -> Samples:
    known = {item.name for item in session.get_inputs()}
    made: Samples = session.run(None, {k: v for k, v in feed.items() if k in known})[0]
    return made
