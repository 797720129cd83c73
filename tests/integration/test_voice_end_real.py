"""The trace's beginning against the recording's silence, on real voices and the real VAD.

What a caller hears as the wait begins with the last sound of the voice. A recorder that knows all
of the recording and the server that hears packets of 20 ms must place it alike. Packets come by a
virtual clock, so nothing depends on how busy the machine is.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import numpy as np
import pytest

from app.conversation.hearing import VoicePlace, place_of_end
from app.conversation.listener import Listener
from app.conversation.session_config import SessionConfig, TurnDetection
from app.recording import RATE, VoicedFrames
from app.talk_client import CHUNK_SAMPLES, load_caller_audio
from audio.endpoint import VoiceEnded
from audio.vad import VadModel

pytestmark = pytest.mark.integration

START_NS = 10_000_000_000
MAX_S = 6.0


def ends_ms(path: Path, vad: VadModel) -> tuple[float, float] | None:
    """When the voice of a recording ends: by the trace, and by the recording itself."""
    audio = load_caller_audio(path, vad)
    if audio.duration_s > MAX_S:
        return None
    config = SessionConfig("", turn_detection=TurnDetection())
    listener = Listener(vad, config, eager_silence_ms=96, max_buffer_s=60)
    # A microphone does not stop with the sentence, and a recorder hears what the server hears.
    recorded = np.concatenate((audio.pcm, np.zeros(RATE, np.int16)))
    voiced = VoicedFrames(recorded.astype(np.float32) / 32768, RATE, vad)
    pcm = recorded.tobytes()
    place: VoicePlace | None = None
    for start in range(0, len(pcm), 2 * CHUNK_SAMPLES):
        packet = pcm[start : start + 2 * CHUNK_SAMPLES]
        now_ns = START_NS + (start + len(packet)) // 2 * 1_000_000_000 // RATE
        for samples in listener.decode(packet):
            for event in listener.feed(samples, now_ns):
                if isinstance(event, VoiceEnded):
                    place = place_of_end(
                        listener, listener.take(0, event.at_sample), 0, event.last_voiced_sample
                    )
    true_end = voiced.last_before(recorded.size)
    if place is None or true_end is None:
        return None
    return (place.spoken_ns - START_NS) / 1e6, true_end * 1000 / RATE


def test_the_trace_begins_where_the_recording_falls_silent(shared_data: Path) -> None:
    vad = VadModel()
    found = [ends_ms(path, vad) for path in sorted((shared_data / "speech").glob("*.flac"))]
    differences = [by_trace - true for by_trace, true in filter(None, found)]
    assert len(differences) >= 12
    apart = sorted(map(abs, differences))
    print(
        f"{len(apart)} recordings: trace minus recording {median(differences):+.1f} ms (median), "
        f"apart {median(apart):.1f} ms (median), {sum(a <= 20 for a in apart)} within 20 ms, "
        f"at most {apart[-1]:.1f} ms"
    )
    assert abs(median(differences)) <= 5, "a systematic offset"
    assert sum(a <= 20 for a in apart) >= 0.9 * len(apart)
