"""WER after packet loss, with and without forward error correction (FEC) of Opus.

    python -m bench.speech.opus_loss ../shared/data/speech/*.flac [--json OUT]

Each recording is encoded as browsers do (Opus, 20 ms, 32 kbit/s, with and without in-band FEC),
goes through our receive buffer and decoder while packets are lost, and is transcribed.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from app.transports.webrtc.jitter import Gap, Packet, ReceiveBuffer
from app.transports.webrtc.opus import OpusDecoder
from audio.files.reader import read_audio
from audio.frame import SPEECH_RATE, Samples
from audio.resample import resample
from bench.harness.results import Result, add_json_option, report
from bench.harness.speech import installed_recognizer, transcripts, word_error_rate

RATE, FRAME = 48_000, 960
LOSSES: dict[str, Callable[[random.Random, int], set[int]]] = {
    "nothing lost": lambda dice, num: set(),
    "1% lost": lambda dice, num: {n for n in range(1, num - 1) if dice.random() < 0.01},
    "5% lost": lambda dice, num: {n for n in range(1, num - 1) if dice.random() < 0.05},
    "15% lost": lambda dice, num: {n for n in range(1, num - 1) if dice.random() < 0.15},
    "60 ms of every 500 ms lost": lambda dice, num: {
        n for n in range(1, num - 1) if n % 25 in (12, 13, 14)
    },
}


def packets_of(samples: Samples, has_fec: bool) -> list[bytes]:
    codec = av.CodecContext.create("libopus", "w")
    codec.sample_rate, codec.layout, codec.format = RATE, "mono", "s16"
    codec.bit_rate, codec.time_base = 32_000, Fraction(1, RATE)
    codec.options = {"application": "voip", "packet_loss": "10", "fec": str(int(has_fec))}
    packets = []
    for start in range(0, len(samples) - FRAME + 1, FRAME):
        pcm = (samples[start : start + FRAME].clip(-1, 1) * 32_767).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(pcm.reshape(1, -1), format="s16", layout="mono")
        frame.sample_rate, frame.pts = RATE, start
        packets += [bytes(packet) for packet in codec.encode(frame)]
    return packets


def received(packets: list[bytes], lost: set[int]) -> Samples:
    buffer, decoder, parts = ReceiveBuffer(), OpusDecoder(), []
    for number, payload in enumerate(packets):
        if number in lost:
            continue
        at_ns = number * 20_000_000
        pieces = buffer.poll(at_ns) + buffer.push(Packet(number, number * FRAME, payload, at_ns))
        for index, piece in enumerate(pieces):
            if isinstance(piece, Gap):
                following = pieces[index + 1]
                assert isinstance(following, Packet)
                parts.append(decoder.conceal(piece.num_ticks, following.payload))
            else:
                parts.append(decoder.decode(piece.payload))
    return np.concatenate(parts)


def measure(files: list[Path]) -> Result:
    """WER of all recordings together, for each pattern of losses."""
    references = transcripts(files[0].parent.parent)
    recognizer = installed_recognizer()
    texts: dict[tuple[str, bool], list[str]] = {}
    for path in files:
        samples = resample(*read_audio(path), RATE)
        for has_fec in (False, True):
            packets = packets_of(samples, has_fec)
            for name, losses in LOSSES.items():
                lost = losses(random.Random(path.name), len(packets))
                speech = resample(received(packets, lost), RATE, SPEECH_RATE)
                text = recognizer.transcribe(speech).text
                texts.setdefault((name, has_fec), []).append(text)
    result = Result(("network", "WER, concealment", "WER, FEC"))
    wanted = [references[path.name] for path in files]
    for name in LOSSES:
        rates = (word_error_rate(wanted, texts[name, has_fec]) for has_fec in (False, True))
        result.add(name, *(round(rate, 4) for rate in rates))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    add_json_option(parser)
    options = parser.parse_args()
    report(measure(options.files), options)


if __name__ == "__main__":
    main()
