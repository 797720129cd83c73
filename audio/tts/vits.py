"""The network of a Piper voice: phoneme ids to samples, a few frames at a time.

    frames   made | halo | [start, end) wanted now | halo | not needed yet

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

# Of a new cost per frame, in the running mean.
_COST_WEIGHT = 0.2


class VitsSession:
    """The three parts of the network, shared by all callers and threads."""

    def __init__(self, path: Path, num_threads: int = 1) -> None:
        """Raises ModelError when ``path`` is no Piper voice."""
        parts = split_voice(path)
        self.hop_len = parts.hop_len
        """Samples a frame."""
        self.halo_len = parts.decoder.halo
        """Frames that are decoded in vain on each side of a part."""
        self.decode_s = 0.001
        """What a frame costs the decoder, a running mean: it tells how busy the machine is."""
        self.flow_halo_len = parts.flow.halo
        """Frames on each side of a part that the flow must see."""
        what = f"the voice {path}"
        self._front = open_session(parts.front.model, num_threads, what)
        self._flow = open_session(parts.flow.model, num_threads, what)
        self._decoder = open_session(parts.decoder.model, num_threads, what)

    def open(self, phoneme_ids: list[int], scales: list[float], sid: int | None) -> Utterance:
        """What is to be said, not yet decoded.

        ``scales``: noise, length, noise of the durations. ``sid``: the speaker, if there are
        several. Raises one of onnx_session.ORT_ERRORS.
        """
        feed: dict[str, NDArray[Any]] = {
            "input": np.array([phoneme_ids], np.int64),
            "input_lengths": np.array([len(phoneme_ids)], np.int64),
            "scales": np.array(scales, np.float32),
        }
        return Utterance(self, _run(self._front, feed | _speaker(sid)), sid)

    def latents(self, frames: Samples, sid: int | None) -> Samples:
        """The flow: frames float32 [1, channels, n] to latents of the same shape."""
        mask = np.ones((1, 1, frames.shape[2]), np.float32)
        names = [item.name for item in self._flow.get_inputs() if item.name != "sid"]
        return _run(self._flow, dict(zip(names, (frames, mask), strict=True)) | _speaker(sid))

    def samples(self, latents: Samples, sid: int | None) -> Samples:
        """The decoder: latents float32 [1, channels, n] to samples [n * hop_len]."""
        begun_s = time.perf_counter()
        (name,) = [item.name for item in self._decoder.get_inputs() if item.name != "sid"]
        made = _run(self._decoder, {name: latents} | _speaker(sid)).reshape(-1)
        cost_s = (time.perf_counter() - begun_s) / latents.shape[2]
        self.decode_s += _COST_WEIGHT * (cost_s - self.decode_s)
        return made


class Utterance:
    """One sentence in the making. Not to be used by two threads at a time."""

    def __init__(self, net: VitsSession, frames: Samples, sid: int | None) -> None:
        """``frames``: float32 [1, channels, n]."""
        self._net = net
        self._frames = frames
        self._sid = sid
        self._latents = frames[:, :, :0]
        self.num_frames: int = frames.shape[2]
        self.num_made = 0
        """Frames whose samples were taken."""

    @property
    def is_over(self) -> bool:
        """Nothing is left to take."""
        return self.num_made >= self.num_frames

    def take(self, num_frames: int) -> Samples:
        """The next ``num_frames``, or what is left: samples float32 [frames * hop_len].

        They are those of a run over the whole sentence. Raises one of onnx_session.ORT_ERRORS.
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
        """Have latents up to ``end`` at least."""
        known, halo = self._latents.shape[2], self._net.flow_halo_len
        if end <= known:
            return
        # A further run would see 2 * halo frames again: not for a rest shorter than that.
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
