"""The turn detector: legal order, monotone times, padding, clicks, pauses."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from audio.endpointing.vad_endpointer import (
    Endpointer,
    ServerVadConfig,
    VoiceEnded,
    VoiceEvent,
    VoicePaused,
    VoiceResumed,
    VoiceStarted,
    VoiceState,
)

WINDOW = 512  # 32 ms
MS = 16


def run(
    probabilities: list[float], config: ServerVadConfig | None = None, first_sample: int = 0
) -> list[VoiceEvent]:
    endpointer = Endpointer(config or ServerVadConfig())
    return feed(endpointer, probabilities, first_sample)


def feed(
    endpointer: Endpointer, probabilities: list[float], first_sample: int = 0
) -> list[VoiceEvent]:
    return [
        event
        for i, p in enumerate(probabilities)
        for event in endpointer.process_window(
            p, first_sample + i * WINDOW, first_sample + (i + 1) * WINDOW
        )
    ]


def test_one_turn() -> None:
    events = run([0.0] * 20 + [0.9] * 10 + [0.0] * 30)
    onset, last = 20 * WINDOW, 30 * WINDOW
    assert events == [
        VoiceStarted(onset, onset - 300 * MS),
        VoicePaused(last),
        VoiceEnded(last, last + 16 * WINDOW),  # 512 ms: the first window at or after 500
    ]


def test_start_comes_with_the_second_voiced_window() -> None:
    endpointer = Endpointer(ServerVadConfig())
    assert endpointer.process_window(0.9, 0, 512) == []
    assert endpointer.state is VoiceState.SILENT
    assert endpointer.last_voiced_sample is None
    assert endpointer.process_window(0.4, 512, 1024) == [
        VoiceStarted(0, 0)
    ]  # above the exit threshold
    assert endpointer.state is VoiceState.SPEAKING
    assert endpointer.last_voiced_sample == 1024


def test_a_click_starts_nothing() -> None:
    assert run([0.0] * 5 + [0.99] + [0.0] * 5 + [0.6] + [0.1] * 40) == []


def test_noise_between_the_thresholds_starts_nothing_but_prolongs_voice() -> None:
    assert run([0.45] * 50) == []
    assert run([0.9] * 3 + [0.45] * 50) == [VoiceStarted(0, 0)]


def test_padding_is_clipped_at_the_start_of_the_stream() -> None:
    assert run([0.0] * 4 + [0.9] * 2)[0] == VoiceStarted(4 * WINDOW, 0)
    offset = 1_000_000
    assert run([0.0] * 4 + [0.9] * 2, first_sample=offset)[0] == VoiceStarted(
        offset + 4 * WINDOW, offset
    )


def test_padding_never_reaches_into_the_last_turn() -> None:
    config = ServerVadConfig(prefix_padding_ms=2_000, silence_ms=320)
    events = run([0.9] * 4 + [0.0] * 10 + [0.9] * 4, config)
    assert events[-1] == VoiceStarted(14 * WINDOW, 4 * WINDOW)


def test_pause_and_resume_within_a_turn() -> None:
    events = run([0.9] * 5 + [0.0] * 8 + [0.9] * 5 + [0.0] * 20)
    assert events == [
        VoiceStarted(0, 0),
        VoicePaused(5 * WINDOW),
        VoiceResumed(13 * WINDOW),
        VoicePaused(18 * WINDOW),
        VoiceEnded(18 * WINDOW, 34 * WINDOW),
    ]


def test_a_gap_shorter_than_the_eager_silence_is_not_reported() -> None:
    assert run([0.9] * 5 + [0.0] * 4 + [0.9] * 5) == [VoiceStarted(0, 0)]


def test_a_click_in_the_pause_neither_resumes_nor_prolongs() -> None:
    events = run([0.9] * 5 + [0.0] * 8 + [0.9] + [0.0] * 20)
    assert events == [
        VoiceStarted(0, 0),
        VoicePaused(5 * WINDOW),
        VoiceEnded(5 * WINDOW, 21 * WINDOW),
    ]


def test_a_voice_that_may_be_returning_holds_the_end_open() -> None:
    config = ServerVadConfig(silence_ms=320)
    events = run([0.9] * 5 + [0.0] * 9 + [0.9] * 2, config)  # its 320 ms end inside the new run
    assert [type(e) for e in events] == [VoiceStarted, VoicePaused, VoiceResumed]
    events = run([0.9] * 5 + [0.0] * 9 + [0.9] + [0.0], config)
    assert events[-1] == VoiceEnded(5 * WINDOW, 16 * WINDOW)


def test_silence_shorter_than_the_eager_silence_still_pauses_first() -> None:
    config = ServerVadConfig(silence_ms=64, eager_silence_ms=160)
    assert run([0.9] * 3 + [0.0] * 3, config) == [
        VoiceStarted(0, 0),
        VoicePaused(3 * WINDOW),
        VoiceEnded(3 * WINDOW, 5 * WINDOW),
    ]


def test_digits_with_gaps_are_one_turn_when_the_silence_is_long_enough() -> None:
    digits = ([0.9] * 6 + [0.0] * 14) * 5  # 448 ms between them
    events = run(digits + [0.0] * 10)
    assert sum(isinstance(e, VoiceEnded) for e in events) == 1
    assert sum(isinstance(e, VoiceResumed) for e in events) == 4


def test_two_turns() -> None:
    events = run(([0.9] * 5 + [0.0] * 20) * 2)
    kinds = [VoiceStarted, VoicePaused, VoiceEnded]
    assert [type(e) for e in events] == kinds * 2


def test_config_may_change_within_a_turn() -> None:
    endpointer = Endpointer(ServerVadConfig())
    feed(endpointer, [0.9] * 5 + [0.0] * 6)
    endpointer.config = ServerVadConfig(silence_ms=200)
    assert endpointer.process_window(0.0, 11 * WINDOW, 12 * WINDOW) == [
        VoiceEnded(5 * WINDOW, 12 * WINDOW)
    ]


def test_reset_forgets_the_turn() -> None:
    endpointer = Endpointer(ServerVadConfig())
    feed(endpointer, [0.9] * 5)
    endpointer.reset()
    assert endpointer.state is VoiceState.SILENT
    assert endpointer.last_voiced_sample is None
    assert feed(endpointer, [0.0] * 30) == []


@pytest.mark.parametrize("threshold", [0.0, -0.1, 1.5])
def test_impossible_thresholds(threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        ServerVadConfig(threshold=threshold)


def test_negative_durations() -> None:
    with pytest.raises(ValueError, match="silence_ms must not be negative"):
        ServerVadConfig(silence_ms=-1)


def test_a_low_threshold_can_still_be_left() -> None:
    assert ServerVadConfig(threshold=0.5).exit_threshold == pytest.approx(0.35)
    assert 0 < ServerVadConfig(threshold=0.1).exit_threshold < 0.1


configs = st.builds(
    ServerVadConfig,
    threshold=st.floats(0.05, 1.0),
    prefix_padding_ms=st.integers(0, 1_000),
    silence_ms=st.integers(0, 1_500),
    eager_silence_ms=st.integers(0, 600),
    min_speech_ms=st.integers(0, 200),
)
# Runs of equal probability, so that turns, pauses and clicks all come up.
probability_runs = st.lists(
    st.tuples(st.sampled_from([0.0, 0.2, 0.4, 0.5, 0.7, 1.0]), st.integers(1, 30)), max_size=20
)
NEXT = {
    None: {VoiceStarted},
    VoiceStarted: {VoicePaused},
    VoicePaused: {VoiceResumed, VoiceEnded},
    VoiceResumed: {VoicePaused},
    VoiceEnded: {VoiceStarted},
}


@given(configs, probability_runs, st.integers(0, 10_000_000))
def test_properties(
    config: ServerVadConfig, runs: list[tuple[float, int]], first_sample: int
) -> None:
    probabilities = [p for p, count in runs for _ in range(count)]
    events = run(probabilities, config, first_sample)
    stream_end = first_sample + len(probabilities) * WINDOW

    previous: type[VoiceEvent] | None = None
    for event in events:
        assert type(event) in NEXT[previous]
        previous = type(event)

    voice: list[int] = []  # alternately where voice is said to begin and to end
    last_end = first_sample
    for event, following in itertools.pairwise([*events, None]):
        match event:
            case VoiceStarted(onset, start):
                assert last_end <= start <= onset
                assert onset - start <= config.prefix_padding_ms * MS
                voice.append(onset)
            case VoicePaused(last):
                voice.append(last)
            case VoiceResumed(sample):
                voice.append(sample)
            case VoiceEnded(last, at):
                assert last == voice[-1]
                assert at - last >= config.silence_ms * MS
                assert at <= stream_end
                last_end = last
        assert following is None or event != following
    assert voice == sorted(voice)
    for begin, end in zip(voice[::2], voice[1::2], strict=False):
        assert end - begin >= config.min_speech_ms * MS


@given(configs, probability_runs)
def test_enough_silence_always_ends_the_turn(
    config: ServerVadConfig, runs: list[tuple[float, int]]
) -> None:
    endpointer = Endpointer(config)
    probabilities = [p for p, count in runs for _ in range(count)]
    probabilities += [0.0] * (config.silence_ms // 32 + 2)
    feed(endpointer, probabilities)
    assert endpointer.state is VoiceState.SILENT
