"""The caller's audio on its way in: when what was spoken, whatever the packets and rates."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from app.conversation.input.audio_input import RATE, AudioInput
from app.conversation.session_config import SessionConfig, TurnDetection
from audio.codecs import AudioFormat
from audio.echo_canceller import FRAME_SAMPLES
from audio.endpointing.speech_offset import find_speech_offset
from audio.endpointing.vad_endpointer import VoiceStarted
from tests.support.fakes import EnergyVad

START_NS = 5_000_000_000
PCM16_16K = AudioFormat("pcm16", 16_000)


def listener(rate: int) -> AudioInput:
    config = SessionConfig("", input_format=AudioFormat("pcm16", rate))
    return AudioInput(cast(Any, EnergyVad()), config, eager_silence_ms=96, max_buffer_s=60)


def speak(to: AudioInput, samples: np.ndarray, rate: int, packet_ms: int, late_ns: int = 0) -> None:
    """Packets are sent when their last sample has been spoken, and arrive ``late_ns`` later."""
    step = rate * packet_ms // 1000
    pcm = (samples * 32767).astype("<i2")
    for start in range(0, len(pcm), step):
        piece = pcm[start : start + step]
        received_ns = START_NS + (start + len(piece)) * 1_000_000_000 // rate + late_ns
        for part in to.decode(piece.tobytes()):
            list(to.process_audio(part, received_ns))


@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000, 48_000])
@pytest.mark.parametrize("packet_ms", [10, 20, 60, 200])
def test_the_instant_is_that_of_the_mouth_and_not_of_the_packet(rate: int, packet_ms: int) -> None:
    heard = listener(rate)
    speak(heard, np.zeros(rate, np.float32), rate, packet_ms)
    for sample in range(1_000, 15_000, 777):
        true_ns = START_NS + sample * 1_000_000_000 // RATE
        assert abs(heard.captured_at_ns(sample) - true_ns) < 1_000_000, sample
    # What the network adds is part of the wait.
    late = listener(rate)
    speak(late, np.zeros(rate, np.float32), rate, packet_ms, late_ns=30_000_000)
    assert late.captured_at_ns(8_000) - heard.captured_at_ns(8_000) == 30_000_000


def test_a_sample_a_message_costs_what_its_audio_costs() -> None:
    heard = listener(16_000)
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, 2 * RATE).astype(np.float32)
    for number in range(samples.size):
        received_ns = START_NS + (number + 1) * 1_000_000_000 // RATE
        list(heard.process_audio(samples[number : number + 1], received_ns))
    np.testing.assert_array_equal(heard.read(0), samples)
    assert len(heard._chunks) <= 20
    assert len(heard._ends) == len(heard._captured) <= 400 + 1
    for sample in range(1_000, 30_000, 777):
        true_ns = START_NS + sample * 1_000_000_000 // RATE
        assert abs(heard.captured_at_ns(sample) - true_ns) < 1_000_000, sample


def speak_with_delays(to: AudioInput, delays_ms: list[int]) -> None:
    """Packets of 20 ms at 16 kHz, each held up by so much; none overtakes another."""
    arrived_ns = 0
    for number, delay_ms in enumerate(delays_ms):
        on_time_ns = START_NS + (number + 1) * 20_000_000
        arrived_ns = max(arrived_ns, on_time_ns + delay_ms * 1_000_000)
        list(to.process_audio(np.zeros(320, np.float32), arrived_ns))


@pytest.mark.parametrize(
    "delays_ms",
    [
        [0] * 30 + [45] + [0] * 30,  # one is late
        [0] * 29 + [120, 100, 80, 60, 40, 20] + [0] * 30,  # a stall, and all at once
        [0] * 29 + [max(0, 3_000 - 20 * n) for n in range(150)] + [0] * 30,  # a long one
        [(7 * n) % 20 for n in range(61)],  # a sender who is never quite in time
    ],
)
def test_what_was_late_is_dated_by_what_was_not(delays_ms: list[int]) -> None:
    heard = listener(16_000)
    speak_with_delays(heard, delays_ms)
    for sample in range(28 * 320, 36 * 320, 160):
        true_ns = START_NS + sample * 1_000_000_000 // RATE
        assert abs(heard.captured_at_ns(sample) - true_ns) <= 4_000_000


def test_a_file_sent_after_a_pause_was_not_late() -> None:
    heard = listener(16_000)
    speak_with_delays(heard, [0] * 30 + [3_000] + [0] * 100)  # two seconds of it at once
    arrived_ns = START_NS + 31 * 20_000_000 + 3_000_000_000
    assert heard.captured_at_ns(60 * 320) == arrived_ns


@pytest.mark.parametrize("pause_ms", [100, 400, 5_000])
def test_a_caller_who_paused_was_not_late(pause_ms: int) -> None:
    heard = listener(16_000)
    speak_with_delays(heard, [0] * 30 + [pause_ms] * 30)
    for sample in (31 * 320, 40 * 320):
        true_ns = START_NS + sample * 1_000_000_000 // RATE + pause_ms * 1_000_000
        assert heard.captured_at_ns(sample) == true_ns


def test_a_changed_format_begins_anew() -> None:
    heard = listener(24_000)
    speak(heard, np.zeros(24_000, np.float32), 24_000, 20)
    position = heard.position
    heard.configure(SessionConfig("", input_format=AudioFormat("pcm16", 8_000)))
    speak(heard, np.zeros(8_000, np.float32), 8_000, 20)
    true_ns = START_NS + 500_000_000
    assert abs(heard.captured_at_ns(position + 8_000) - true_ns) < 1_000_000


def test_a_file_sent_at_once_is_not_taken_for_a_caller_who_waits() -> None:
    heard = listener(16_000)
    pcm = np.zeros(3 * 16_000, "<i2").tobytes()
    for part in heard.decode(pcm):
        list(heard.process_audio(part, START_NS))
    assert START_NS - heard.captured_at_ns(16_000) <= 200_000_000


@pytest.mark.parametrize("phase_ms", range(0, 20, 5))
def test_the_end_of_a_voice_is_found_to_a_few_milliseconds(phase_ms: int) -> None:
    """From the packets to the trace's ``speech_end``, as ``Hearing`` puts it together."""
    rate, end_s = 24_000, 0.9 + phase_ms / 1000
    t = np.arange(2 * rate) / rate
    tone = 0.3 * np.sin(2 * np.pi * 200 * t) * (t >= 0.3) * (t < end_s)
    config = SessionConfig(
        "", turn_detection=TurnDetection(), input_format=AudioFormat("pcm16", rate)
    )
    heard = AudioInput(cast(Any, EnergyVad()), config, eager_silence_ms=96, max_buffer_s=60)
    speak(heard, tone.astype(np.float32), rate, 20)
    last_voiced = int(1.1 * RATE)  # the model lets go late
    found = heard.captured_at_ns(find_speech_offset(heard.read(0), last_voiced))
    assert abs(found - START_NS - end_s * 1e9) < 11_000_000  # levels are taken of 10 ms


class Watching(EnergyVad):
    """Notes all that it is shown."""

    def __init__(self) -> None:
        self.seen: list[np.ndarray] = []

    def run(self, window: Any, h: Any, c: Any) -> Any:
        self.seen.append(window[0, -512:].copy())
        return super().run(window, h, c)


@pytest.mark.parametrize("packet", [320, 333])
def test_the_detector_sees_every_sample_once_whatever_is_switched_on(packet: int) -> None:
    """Noise reduction on and off, our own voice sounding and not: positions stay what they are."""
    vad = Watching()
    semantic = TurnDetection(kind="semantic_vad")
    configs = [
        SessionConfig(
            "", input_format=PCM16_16K, turn_detection=semantic, noise_reduction=reduction
        )
        for reduction in (None, "far_field", None, "near_field", "far_field", None)
    ]
    heard = AudioInput(cast(Any, vad), configs[0], eager_silence_ms=96, max_buffer_s=60)
    dice = np.random.default_rng(0)
    signal = dice.normal(0, 0.003, 6 * RATE).astype(np.float32)
    number = 0
    for start in range(0, signal.size, packet):
        if start * len(configs) // signal.size > number:
            number += 1
            heard.configure(configs[number])
        if number in (2, 4) and start % 3 == 0:  # our own voice now and then
            heard.echo.add_playback(np.zeros(160, np.float32), RATE, heard.position)
        list(heard.process_audio(signal[start : start + packet], start))
        lag = heard.position - heard._vad.num_samples_seen
        assert 0 <= lag < 256, "less than 16 ms wait"
    assert (
        heard._vad.num_samples_seen == signal.size // FRAME_SAMPLES * FRAME_SAMPLES
        or lag < FRAME_SAMPLES
    )
    seen = np.concatenate(vad.seen)
    # Without anything to do, it is the input as it came: the first part, to the sample.
    np.testing.assert_array_equal(seen[: RATE // 2], signal[: RATE // 2])


def test_reduced_noise_is_no_voice_and_a_voice_lies_where_it_lay() -> None:
    def starts(noise_reduction: Any) -> list[int]:
        config = SessionConfig(
            "",
            input_format=PCM16_16K,
            turn_detection=TurnDetection(kind="server_vad"),
            noise_reduction=noise_reduction,
        )
        heard = AudioInput(cast(Any, EnergyVad()), config, eager_silence_ms=96, max_buffer_s=60)
        signal = np.random.default_rng(0).normal(0, 0.012, 4 * RATE).astype(np.float32)
        time_s = np.arange(RATE) / RATE
        signal[2 * RATE : 3 * RATE] += (0.3 * np.sin(2 * np.pi * 300 * time_s)).astype(np.float32)
        events = []
        for start in range(0, signal.size, 320):
            events += list(heard.process_audio(signal[start : start + 320], start))
        return [event.onset_sample for event in events if isinstance(event, VoiceStarted)]

    assert starts(None)[0] < RATE, "loud noise looks like a voice to this detector"
    reduced = [start for start in starts("far_field") if start > RATE]
    assert len(reduced) == 1 and abs(reduced[0] - 2 * RATE) <= 512


@pytest.mark.parametrize("reduction", [None, "near_field", "far_field"])
def test_windows_of_denoised_audio_do_not_go_with_the_unprocessed(reduction: Any) -> None:
    config = SessionConfig("", input_format=PCM16_16K, noise_reduction=reduction)
    heard = AudioInput(cast(Any, EnergyVad()), config, eager_silence_ms=96, max_buffer_s=60)
    speak(heard, np.full(RATE, 0.1, np.float32), RATE, 20)
    first, rest = heard.read_turn(0, 8_000), heard.read_turn(8_000)
    for audio in (first, rest, first.followed_by(rest)):
        assert (audio.windows is None) == (reduction is not None)
    assert first.followed_by(rest).num_samples == RATE
