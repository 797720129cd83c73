"""What counts as speech, what as a loop, and where recordings are cut. No model needed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from audio.asr.hallucination_filter import (
    Decoding,
    Fault,
    VoiceActivity,
    find_fault,
    has_loop,
    is_plausible,
    more_plausible,
)
from audio.asr.segmentation import AudioSegment
from audio.vad import WINDOW_SAMPLES, VadWindows

CLEAR = VoiceActivity(peak=0.98, voiced_s=2.0)
FAINT = VoiceActivity(peak=0.66, voiced_s=0.4)


def decoding(
    text: str,
    avg_logprob: float = -0.3,
    *,
    num_tokens: int | None = None,
    ratio: float = 1.0,
    was_capped: bool = False,
) -> Decoding:
    return Decoding(
        text=text,
        num_tokens=len(text.split()) + 1 if num_tokens is None else num_tokens,
        avg_logprob=avg_logprob,
        no_speech_prob=0.1,
        compression_ratio=ratio,
        encoder_frames=1_000,
        was_capped=was_capped,
    )


def test_voice_is_measured_from_probabilities() -> None:
    voice = VoiceActivity.measure(np.array([0.0, 0.6, 0.9, 0.4], np.float32))
    assert voice.peak == pytest.approx(0.9)
    assert voice.voiced_s == pytest.approx(0.064)
    assert not voice.is_absent
    assert VoiceActivity.measure(np.full(300, 0.25, np.float32)).is_absent
    assert VoiceActivity.measure(np.zeros(0, np.float32)).is_absent


# (text, log-probability, tokens, peak, voiced seconds) as measured with tiny.en
@pytest.mark.parametrize(
    ("text", "logprob", "num_tokens", "peak", "voiced_s"),
    [
        ("Yes!", -0.47, 2, 0.98, 0.45),
        ("two", -0.88, 1, 0.95, 0.83),
        ("cancel", -1.38, 1, 0.99, 0.51),
        ("Goodbye.", -0.59, 2, 0.68, 0.42),
        ("Good morning", -0.59, 2, 0.98, 0.67),
        ("10 of clubs", -0.42, 3, 0.99, 0.74),
        ("Thank you.", -0.3, 3, 0.98, 0.5),
        ("The navy attacked the big task force.", -0.3, 18, 0.58, 0.93),
        ("You who were always accused of being shot", -0.83, 12, 0.99, 4.64),
    ],
)
def test_real_speech_survives(
    text: str, logprob: float, num_tokens: int, peak: float, voiced_s: float
) -> None:
    assert is_plausible(
        decoding(text, logprob, num_tokens=num_tokens), VoiceActivity(peak, voiced_s)
    )


@pytest.mark.parametrize(
    ("text", "logprob", "num_tokens", "peak", "voiced_s"),
    [
        ("", 0.0, 0, 0.98, 1.0),
        (". . . .", -0.1, 48, 0.98, 1.0),
        ("you", -1.1, 1, 0.02, 0.0),
        ("Thank you.", -0.77, 3, 0.09, 0.0),
        ("The end.", -2.07, 3, 0.14, 0.0),
        ("You did, ladies. You did well?", -0.82, 9, 0.69, 0.64),
        ("So we got this like, it's okay.", -1.64, 10, 0.66, 0.38),
        ("Thank you.", -1.22, 3, 0.97, 11.94),  # twelve seconds of a crowd
        ("Thanks for watching!", -0.6, 4, 0.6, 0.2),
    ],
)
def test_what_was_invented_over_noise_is_dropped(
    text: str, logprob: float, num_tokens: int, peak: float, voiced_s: float
) -> None:
    assert not is_plausible(
        decoding(text, logprob, num_tokens=num_tokens), VoiceActivity(peak, voiced_s)
    )


@pytest.mark.parametrize(
    "text",
    [
        "no no no no no",
        "7 7",
        "Bye bye!",
        "hold on, hold on, hold on",
        "What's the weather like? What's the weather like?",
        "He came. It must be in the neighborhood. It must be in the neighborhood.",
        "a bit of a little bit of a little bit of a thing",
        "1 1 1 1 1 1 1",
    ],
)
def test_loops(text: str) -> None:
    assert has_loop(text)
    assert find_fault(decoding(text), CLEAR) is Fault.LOOP


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Yes.",
        "4 1 5 5 5 5 0 1 3 2",
        "No, no, no, I mean it.",
        "Hold on, hold fast, hold out.",
        "When is a lobster not a lobster? When it is a crayfish.",
        "Ask not what your country can do for you, ask what you can do for your country.",
    ],
)
def test_natural_repetition_is_no_loop(text: str) -> None:
    assert not has_loop(text)


@given(st.lists(st.sampled_from("abcde"), min_size=3, max_size=8), st.integers(2, 5))
def test_any_long_phrase_said_twice_is_a_loop(phrase: list[str], count: int) -> None:
    assert has_loop(" ".join(["x", *phrase * count, "y"]))


def test_faults() -> None:
    assert find_fault(decoding("all is well here"), CLEAR) is None
    assert find_fault(decoding("all is well here", was_capped=True), CLEAR) is Fault.LOOP
    assert find_fault(decoding("all is well here", ratio=2.5), CLEAR) is Fault.LOOP
    assert (
        find_fault(decoding("should i get", num_tokens=3), VoiceActivity(0.99, 2.8))
        is Fault.TOO_LITTLE
    )
    assert find_fault(decoding("all is well here", -1.2), CLEAR) is Fault.LOW_CONFIDENCE
    assert (
        find_fault(decoding("4 1 5 5 5 5 0 1 3 2", num_tokens=10), VoiceActivity(0.99, 5.6)) is None
    )


def test_better_prefers_the_sound_one_then_the_surer_one_and_the_shorter_loop() -> None:
    sound, surer = decoding("all is well here", -0.5), decoding("all is well there", -0.2)
    loop, longer = decoding("a b c a b c", -0.1), decoding("a b c a b c a b c", -0.05)
    assert more_plausible(loop, sound, CLEAR) is sound
    assert more_plausible(sound, surer, CLEAR) is surer
    assert more_plausible(longer, loop, CLEAR) is loop


def piece(probabilities: list[float], loudness: list[float] | None = None) -> AudioSegment:
    levels = loudness or [0.3 if p >= 0.5 else 0.001 for p in probabilities]
    noise = np.random.default_rng(0).standard_normal(len(levels) * WINDOW_SAMPLES)
    samples = (noise * np.repeat(levels, WINDOW_SAMPLES)).astype(np.float32)
    return AudioSegment(samples, VadWindows(np.array(probabilities, np.float32)))


def test_silence_at_the_ends_is_trimmed_to_a_second() -> None:
    trimmed = piece([0.0] * 100 + [0.9] * 10 + [0.0] * 200).trimmed()
    assert trimmed.windows.probabilities.size == 31 + 10 + 31
    assert trimmed.num_samples == 72 * WINDOW_SAMPLES
    assert piece([0.1] * 50).trimmed().num_samples == 0
    short = piece([0.0] * 3 + [0.9] * 10)
    assert short.trimmed().num_samples == short.num_samples


def test_halves_are_cut_in_the_pause() -> None:
    left, right = piece([0.9] * 40 + [0.05] * 10 + [0.9] * 35).split_in_half()
    assert 40 <= left.windows.probabilities.size < 50
    assert left.windows.probabilities.size + right.windows.probabilities.size == 85


def test_without_a_pause_the_cut_is_where_it_is_least_loud() -> None:
    loudness = [0.3] * 35 + [0.02] * 7 + [0.3] * 43
    left, _ = piece([0.9] * 85, loudness).split_in_half()
    assert 35 <= left.windows.probabilities.size < 42


def test_long_audio_is_cut_at_pauses_and_nothing_is_lost() -> None:
    talk = ([0.9] * 90 + [0.02] * 12) * 30  # 98 s
    whole = piece(talk)
    parts = whole.split_at_pauses(28.0)
    assert all(part.duration_s <= 28.0 for part in parts)
    np.testing.assert_array_equal(np.concatenate([p.samples for p in parts]), whole.samples)
    for part in parts[:-1]:
        assert part.duration_s > 15.0
        assert part.windows.probabilities[-2:].max() < 0.5
    assert len(piece([0.9] * 100).split_at_pauses(28.0)) == 1


@given(st.lists(st.floats(0, 1, width=32), max_size=300), st.floats(0.1, 3.0))
def test_cutting_never_loses_a_sample(probabilities: list[float], max_s: float) -> None:
    whole = piece(probabilities)
    parts = whole.split_at_pauses(max_s)
    np.testing.assert_array_equal(np.concatenate([p.samples for p in parts]), whole.samples)
    assert all(p.duration_s <= max(max_s, 0.032) for p in parts)
    assert all(p.num_samples == p.windows.probabilities.size * WINDOW_SAMPLES for p in parts)
