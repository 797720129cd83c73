"""The trace's beginning against the recording's silence, on real voices and the real VAD.

What a caller hears as the wait begins with the last sound of the voice. A recorder that knows all
of the recording and the server that hears packets of 20 ms must place it alike, and where a person
places it who looks at waveform and spectrogram. Packets come by a virtual clock, so nothing depends
on how busy the machine is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from app.clients.recording import RATE
from app.clients.talk import CHUNK_SAMPLES, CallerAudio, load_caller_audio
from app.conversation.input.audio_input import AudioInput
from app.conversation.input.user_turn import final_speech_offset
from app.conversation.session_config import SessionConfig, TurnDetection
from audio.endpointing.vad_endpointer import VoiceEnded
from audio.tts.synthesizer import Synthesizer
from audio.vad import VadModel
from bench.voice.script import Kind, Line, speak_line
from tests.support.speech import Recordings, Voice

pytestmark = pytest.mark.integration

START_NS = 10_000_000_000
# Read by eye (2026-11-30), before either side was measured with the rule of today: the last sound
# ends between these. A range is as wide as the fade is long; most end in a consonant's release.
BY_EYE_MS = {
    "az_chat1": (4_420, 4_470),
    "az_weather": (1_170, 1_260),
    "lj_LJ002-0035": (1_485, 1_505),
    "ls_1688-142285-0002": (2_260, 2_320),
    "ls_1688-142285-0005": (3_760, 3_800),
    "ls_2609-156975-0001": (4_470, 4_505),
    "ls_3005-163389-0002": (3_085, 3_115),
    "ls_3005-163389-0008": (4_720, 4_750),
    "ls_367-130732-0001": (3_850, 3_885),
    "sb_birch": (3_185, 3_200),
    "sb_calc": (3_700, 3_735),
    "sb_spk1_snt1": (2_860, 2_875),
    "sb_spk1_snt2": (3_090, 3_115),
    "sb_spk1_snt3": (2_695, 2_720),
    "sb_spk1_snt4": (2_480, 2_510),
    "sb_spk1_snt5": (2_530, 2_570),
    "sb_spk1_snt6": (2_215, 2_230),
    "un_dog_or_cat": (1_580, 1_627),
    "un_seine": (1_530, 1_545),
}
ENDS_IN_A_STOP = (
    "Tell me a long story about a dog.",
    "Where is the bank?",
    "I would like a big red bag.",
    "Turn on the light.",
    "Did you call Bob?",
    "Set an alarm for eight.",
    "Sorry. Which one is the fastest?",
    "Please help.",
)
# The VAD's windows of 32 ms fall differently in every call.
PHASES_MS = (0, 7, 14, 21, 28)


@pytest.fixture(scope="module")
def vad() -> VadModel:
    return VadModel()


def caller_audio(recordings: Recordings, name: str, vad: VadModel) -> CallerAudio:
    return load_caller_audio(recordings.person(f"speech/{name}.flac").path, vad)


def spoken(audio: CallerAudio, phase_ms: int) -> Iterator[tuple[bytes, int]]:
    """Packets and when they arrive; sample 0 of the recording is spoken at START_NS."""
    lead = RATE // 2 + RATE * phase_ms // 1000
    pcm = np.concatenate((np.zeros(lead, np.int16), audio.pcm, np.zeros(RATE, np.int16)))
    for start in range(0, pcm.size, CHUNK_SAMPLES):
        packet = pcm[start : start + CHUNK_SAMPLES]
        yield packet.tobytes(), START_NS + (start + packet.size - lead) * 1_000_000_000 // RATE


def end_by_trace_ms(audio: CallerAudio, vad: VadModel, phase_ms: int) -> float | None:
    """When the voice of a recording ends, as the server finds it packet by packet."""
    config = SessionConfig("", turn_detection=TurnDetection())
    listener = AudioInput(vad, config, eager_silence_ms=96, max_buffer_s=60)
    found: float | None = None
    for packet, now_ns in spoken(audio, phase_ms):
        for samples in listener.decode(packet):
            for event in listener.process_audio(samples, now_ns):
                if isinstance(event, VoiceEnded):
                    start = listener.kept_from
                    turn = listener.read_turn(start, event.at_sample)
                    offset = final_speech_offset(turn, start, event.last_voiced_sample)
                    found = (listener.captured_at_ns(start + offset) - START_NS) / 1e6
    return found


def end_by_recording_ms(audio: CallerAudio) -> float:
    """The same by the recording itself."""
    end = audio.voiced.last_before(audio.pcm.size)
    assert end is not None
    return end * 1000 / RATE


def test_a_voice_is_found_to_a_frame(voice: Voice, vad: VadModel) -> None:
    said = voice.say("Turn on the light.")
    audio = load_caller_audio(said.path, vad)
    # The room's noise is 35 dB below.
    audible = np.flatnonzero(np.abs(said.samples(RATE)) > 0.03)
    end, middle = audio.voiced.last_before(audio.pcm.size), audible[audible.size // 2]
    assert end == pytest.approx(audible[-1], abs=0.03 * RATE)
    before = audio.voiced.last_before(middle)
    assert before is not None and middle - 0.1 * RATE <= before <= middle
    assert audio.voiced.last_before(0) is None


def test_the_trace_begins_where_the_recording_falls_silent(
    recordings: Recordings, vad: VadModel
) -> None:
    differences = []
    for name in BY_EYE_MS:
        audio = caller_audio(recordings, name, vad)
        for phase_ms in PHASES_MS:
            by_trace = end_by_trace_ms(audio, vad, phase_ms)
            assert by_trace is not None, name
            differences.append(by_trace - end_by_recording_ms(audio))
    apart = np.abs(differences)
    print(
        f"{apart.size} ends: trace minus recording {median(differences):+.1f} ms (median), "
        f"apart {np.percentile(apart, 50):.1f} ms (median), {np.percentile(apart, 95):.1f} (p95), "
        f"{apart.max():.1f} (at most), {np.mean(apart <= 20):.1%} within 20 ms"
    )
    assert abs(median(differences)) <= 5, "a systematic offset"
    assert np.mean(apart <= 20) >= 0.97


def test_both_hear_the_release_of_a_last_consonant(tts_voice_path: Path, vad: VadModel) -> None:
    """It fills one or two frames, behind a silence in which the VAD may have let go."""
    voice = Synthesizer(tts_voice_path, noise_scale=0.0, noise_w_scale=0.0)
    apart = []
    for text in ENDS_IN_A_STOP:
        audio = speak_line(Line(Kind.PLAIN, text), voice, vad).audio
        for phase_ms in PHASES_MS:
            by_trace = end_by_trace_ms(audio, vad, phase_ms)
            assert by_trace is not None, text
            apart.append(abs(by_trace - end_by_recording_ms(audio)))
    print(f"{len(apart)} ends: {max(apart):.1f} ms apart at most")
    assert max(apart) <= 40
    assert np.mean(np.array(apart) <= 20) >= 0.95


def test_both_end_the_voice_where_a_person_does(recordings: Recordings, vad: VadModel) -> None:
    misses = []
    for name, (earliest, latest) in BY_EYE_MS.items():
        audio = caller_audio(recordings, name, vad)
        ends = [end_by_trace_ms(audio, vad, phase_ms) for phase_ms in PHASES_MS]
        for end in [end_by_recording_ms(audio), *ends]:
            if end is None or not earliest - 25 <= end <= latest + 20:
                misses.append((name, end))
    assert misses == []
