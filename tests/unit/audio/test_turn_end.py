"""How long to wait for the caller: sentences, their completeness, and the waits that follow."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from audio.asr.hallucination_filter import PunctuationLogprobs
from audio.endpointing.prosody import Prosody, measure_prosody
from audio.endpointing.semantic import (
    ENDPOINTING_DELAYS,
    Completeness,
    Eagerness,
    Evidence,
    classify_completeness,
    end_of_turn_probability,
    endpointing_delay_ms,
    is_declarative,
    punctuation_features,
)
from audio.frame import SPEECH_RATE, Samples

QUESTION, SENTENCE = Completeness.QUESTION, Completeness.SENTENCE
OPEN, TRAILING = Completeness.OPEN, Completeness.TRAILING
COUNTING, NOTHING = Completeness.COUNTING, Completeness.NOTHING

TABLE = [
    ("What's the weather like?", QUESTION),
    ("Where are you from?", QUESTION),
    ("What is it for?", QUESTION),
    ("What's 37.67 minus 75.7?", QUESTION),
    ("Good morning.", SENTENCE),
    ("I really like animals. Let's talk about working dogs.", SENTENCE),
    ("Set an alarm for 7.", SENTENCE),
    ("I'd like this.", SENTENCE),
    ("yes", SENTENCE),
    ("No, thank you", SENTENCE),
    ("should i get a dog or a cat", OPEN),
    ("And so my fellow Americans ask not", OPEN),
    ("Should I get.", OPEN),
    ("If you go to the store.", OPEN),
    ("My name is John.", OPEN),
    ("I would like to", TRAILING),
    ("I want to go to the.", TRAILING),
    ("Tell me about the", TRAILING),
    ("Please name", TRAILING),
    ("Okay. Could you please describe.", TRAILING),
    ("What is your name.", OPEN),
    ("Where can I go with?", QUESTION),
    ("Well, um", TRAILING),
    ("Um.", TRAILING),
    ("I went home and", TRAILING),
    ("I really...", TRAILING),
    ("They help the police catch bad guys and f-", TRAILING),
    ("Police dogs,", TRAILING),
    ("one, two, three.", COUNTING),
    ("4 1 5 5 5 5", COUNTING),
    ("Four one five five five.", COUNTING),
    ("My number is 5 5", COUNTING),
    ("It's spelled D O E", COUNTING),
    ("alpha bravo charlie.", COUNTING),
    ("0 1", COUNTING),
    ("Oh two.", COUNTING),
    ("On November 12.", SENTENCE),
    ("November 12.", SENTENCE),
    ("november oscar papa", COUNTING),
    ("", NOTHING),
    (" ... ", NOTHING),
]


@pytest.mark.parametrize(("text", "expected"), TABLE)
def test_completeness(text: str, expected: Completeness) -> None:
    assert classify_completeness(text) is expected


SURE_OF_A_STOP = PunctuationLogprobs(-0.05, -4.0, -5.0, -6.0, -6.0, -5.0)
SURE_OF_MORE = PunctuationLogprobs(-3.5, -6.0, -6.0, -1.5, -2.0, -1.0)


STORIES = (
    "This was the forest near Ingolstadt.",
    "They swarmed up in front of the palings as thick as they could jam together.",
    "And you couldn't hear yourself think.",
    "When I came home it was dark. The door was open and nobody there",
    "If the reader will excuse me, I will say nothing of it.",
    "Well, my sister has two children.",
)
REQUESTS = (
    "What's the weather like?",
    "I would like to book a table for two.",
    "I'd like two large pizzas, please.",
    "I just want to know the time.",
    "Block my bank account until tomorrow.",
    "My sister has a birthday on Sunday. What could I give her?",
    "My sister has a birthday on Sunday. Please remind me of it.",
    "When I get home, turn on the lights.",
    "Does she like to swim",
    "My name is John.",
    "It is blue.",
    "",
)


@pytest.mark.parametrize("text", STORIES)
def test_a_story_is_told_from_a_request(text: str) -> None:
    assert is_declarative(text)


def test_an_end_that_is_heard_in_a_story_is_believed_less() -> None:
    said = "This was the forest near Ingolstadt."
    asked = "What was the forest near Ingolstadt?"
    for odds in (1.0, 2.0):
        gains = [
            math.log(end_of_turn_probability(heard) / (1 - end_of_turn_probability(heard)))
            - math.log(end_of_turn_probability(deaf) / (1 - end_of_turn_probability(deaf)))
            for text in (said, asked)
            for deaf, heard in [
                (
                    Evidence(
                        text, end_logprob=-1.0, punctuation=SURE_OF_A_STOP, end_of_turn_logit=0.0
                    ),
                    Evidence(
                        text, end_logprob=-1.0, punctuation=SURE_OF_A_STOP, end_of_turn_logit=odds
                    ),
                )
            ]
        ]
        assert 0 < gains[0] < gains[1]


@pytest.mark.parametrize("text", REQUESTS)
def test_requests_and_short_answers_are_no_stories(text: str) -> None:
    assert not is_declarative(text)


@given(st.text(max_size=80))
def test_any_text_has_a_completeness_and_a_wait(text: str) -> None:
    assert isinstance(classify_completeness(text), Completeness)
    for eagerness in ENDPOINTING_DELAYS:
        waits = ENDPOINTING_DELAYS[eagerness]
        least, most = waits.min_ms, max(waits.max_ms, waits.counting_ms, waits.trailing_ms)
        assert least <= endpointing_delay_ms(Evidence(text), eagerness) <= most


@given(
    st.sampled_from([text for text, _ in TABLE]),
    st.floats(-20, 0),
    st.floats(-20, 0),
    st.sampled_from(["low", "medium", "high", "auto"]),
)
def test_a_likelier_end_never_means_a_longer_wait(
    text: str, one: float, other: float, eagerness: Eagerness
) -> None:
    low, high = sorted((one, other))
    assert endpointing_delay_ms(
        Evidence(text, end_logprob=high), eagerness
    ) <= endpointing_delay_ms(Evidence(text, end_logprob=low), eagerness)


@given(
    st.sampled_from([*STORIES, *REQUESTS, *(text for text, _ in TABLE)]),
    st.floats(-8, 8),
    st.floats(-8, 8),
    st.one_of(st.none(), st.floats(-20, 0)),
    st.sampled_from([None, SURE_OF_A_STOP, SURE_OF_MORE]),
    st.one_of(st.none(), st.floats(0, 1)),
)
def test_an_end_that_is_heard_better_never_means_a_longer_wait(
    text: str,
    one: float,
    other: float,
    end_logprob: float | None,
    marks: PunctuationLogprobs | None,
    model: float | None,
) -> None:
    low, high = (
        endpointing_delay_ms(
            Evidence(
                text,
                end_logprob=end_logprob,
                punctuation=marks,
                end_of_turn_logit=odds,
                smart_turn_probability=model,
            )
        )
        for odds in sorted((one, other))
    )
    assert high <= low


@given(
    st.sampled_from([*STORIES, *REQUESTS]), st.floats(-8, 8), st.floats(-20, 0), st.floats(-20, 0)
)
def test_nor_does_an_end_that_the_model_expects_where_it_is_heard(
    text: str, odds: float, one: float, other: float
) -> None:
    low, high = (
        endpointing_delay_ms(Evidence(text, end_logprob=logprob, end_of_turn_logit=odds))
        for logprob in sorted((one, other))
    )
    assert high <= low


@pytest.mark.parametrize(("text", "kind"), TABLE)
def test_the_eager_wait_less_than_the_patient(text: str, kind: Completeness) -> None:
    high, medium, low = (endpointing_delay_ms(Evidence(text), e) for e in ("high", "medium", "low"))
    assert high <= medium <= low
    assert endpointing_delay_ms(Evidence(text), "auto") == medium


def test_a_whole_question_is_answered_at_once_and_half_a_sentence_waited_for() -> None:
    falling = Prosody((-14.0, -9.0, -8.0), -0.15, -0.25, 0.2, 0.5)
    whole = Evidence("What's the weather like?", falling, end_logprob=-0.1)
    half = Evidence("And so my fellow Americans.", falling, end_logprob=-6.0)
    assert endpointing_delay_ms(whole) == ENDPOINTING_DELAYS["auto"].min_ms
    assert endpointing_delay_ms(half) >= 700, (
        "the model does not expect the full stop that Whisper set"
    )
    assert (
        endpointing_delay_ms(Evidence("I want to go to the.", falling, end_logprob=-0.1)) >= 1_100
    )


def test_without_the_models_word_a_full_stop_is_not_believed_so_easily() -> None:
    text = "I would like to know how to make it."
    told = Evidence(text, end_logprob=-0.3)
    assert endpointing_delay_ms(Evidence(text), "high") > endpointing_delay_ms(told, "high")
    assert endpointing_delay_ms(Evidence(text)) > 400


def test_a_word_that_cannot_end_a_sentence_is_doubted_where_the_end_is_heard() -> None:
    text = "Please verify my reservation at Bardon A"
    heard, unheard = (
        Evidence(text, end_logprob=-0.5, punctuation=SURE_OF_A_STOP, end_of_turn_logit=odds)
        for odds in (4.0, None)
    )
    assert classify_completeness(text) is TRAILING
    assert endpointing_delay_ms(heard) == ENDPOINTING_DELAYS["auto"].likely_ms
    assert endpointing_delay_ms(unheard) == ENDPOINTING_DELAYS["auto"].trailing_ms


def test_digits_and_unfinished_words_get_more_than_a_second() -> None:
    for text in ("4 1 5 5", "I would like to", "Police dogs,"):
        assert endpointing_delay_ms(Evidence(text, end_logprob=0.0)) > 1_000


@pytest.mark.parametrize("end_logprob", [None, -1.5])
def test_the_recognisers_own_doubt_about_its_full_stop_is_heard(end_logprob: float | None) -> None:
    text = "I would like to know how to make it."
    stop, more = (
        Evidence(text, end_logprob=end_logprob, punctuation=marks)
        for marks in (SURE_OF_A_STOP, SURE_OF_MORE)
    )
    assert end_of_turn_probability(stop) > end_of_turn_probability(more) + 0.2
    assert (
        endpointing_delay_ms(more) == ENDPOINTING_DELAYS["auto"].max_ms > endpointing_delay_ms(stop)
    )


@given(st.lists(st.floats(-21, 0), min_size=6, max_size=6))
def test_any_marks_have_signs(logprobs: list[float]) -> None:
    marks = PunctuationLogprobs(*logprobs)
    assert all(math.isfinite(sign) for sign in punctuation_features(marks))
    assert 0 < end_of_turn_probability(Evidence("Good morning.", punctuation=marks)) < 1


def test_what_a_turn_model_says_counts() -> None:
    for text, logprob in (("And so my fellow Americans", -5.0), ("What's the weather like?", -0.1)):
        no, unknown, yes = (
            Evidence(text, end_logprob=logprob, smart_turn_probability=p)
            for p in (0.02, None, 0.98)
        )
        assert (
            0
            < end_of_turn_probability(no)
            < end_of_turn_probability(unknown)
            < end_of_turn_probability(yes)
            < 1
        )
    certain, doubtful = (
        Evidence("I would like to know how to make it.", smart_turn_probability=p)
        for p in (0.98, 0.02)
    )
    assert (
        endpointing_delay_ms(certain)
        < endpointing_delay_ms(doubtful)
        == ENDPOINTING_DELAYS["auto"].max_ms
    )


@pytest.mark.parametrize("end_logprob", [None, -1.5])
def test_what_the_recognisers_ear_says_counts(end_logprob: float | None) -> None:
    text = "I would like to know how to make it."
    done, going_on = (
        Evidence(text, end_logprob=end_logprob, punctuation=SURE_OF_A_STOP, end_of_turn_logit=odds)
        for odds in (4.0, -4.0)
    )
    assert end_of_turn_probability(done) > end_of_turn_probability(going_on) + 0.5
    assert endpointing_delay_ms(done) == ENDPOINTING_DELAYS["auto"].min_ms
    assert endpointing_delay_ms(going_on) == ENDPOINTING_DELAYS["auto"].max_ms


def tone(hz: float, seconds: float, level: float = 0.3) -> Samples:
    t = np.arange(int(seconds * SPEECH_RATE)) / SPEECH_RATE
    # Two partials: the pitch is the difference, as with a voice.
    wave = np.sin(2 * np.pi * hz * t) + 0.5 * np.sin(4 * np.pi * hz * t)
    return (level * wave).astype(np.float32)


def test_a_falling_voice_is_seen_to_fall() -> None:
    flat = np.concatenate((tone(150, 1.5), tone(150, 0.3)))
    fallen = np.concatenate((tone(150, 1.5), tone(110, 0.3, 0.1)))
    even, down = measure_prosody(flat, flat.size), measure_prosody(fallen, fallen.size)
    assert even.pitch_drop == pytest.approx(0, abs=0.02)
    assert down.pitch_drop == pytest.approx(np.log(110 / 150), abs=0.03)
    assert even.levels_db[0] > -1 > -8 > down.levels_db[0]
    assert even.pitched_share == pytest.approx(1)


@pytest.mark.parametrize("num_samples", [0, 1, 500, 1_120, 40_000])
def test_what_is_no_voice_has_no_prosody(num_samples: int) -> None:
    silence = np.zeros(num_samples, np.float32)
    assert measure_prosody(silence, num_samples) == Prosody(
        measure_prosody(silence, num_samples).levels_db
    )


def test_only_what_lies_before_the_end_counts() -> None:
    voice = tone(200, 1.0)
    noisy = np.concatenate((voice, np.random.default_rng(0).normal(0, 0.5, 8_000))).astype("f4")
    assert measure_prosody(noisy, voice.size) == measure_prosody(voice, voice.size)


def test_waits_are_in_order() -> None:
    for one, other in itertools.pairwise(("high", "medium", "low")):
        a, b = ENDPOINTING_DELAYS[one], ENDPOINTING_DELAYS[other]  # type: ignore[index]
        assert (a.min_ms, a.max_ms, a.no_transcript_ms) < (b.min_ms, b.max_ms, b.no_transcript_ms)
        assert (a.confident_from, a.likely_ms) < (b.confident_from, b.likely_ms)


@pytest.mark.parametrize("part", ["and ", "so well and ", "a.", "4, 1, ", "... ", " ", "日", "a-"])
def test_a_very_long_turn_is_judged_soon(part: str) -> None:
    text = part * (400_000 // len(part))
    began_s = time.process_time()
    endpointing_delay_ms(Evidence(text, end_of_turn_logit=0.0))
    assert time.process_time() - began_s < 3.0  # which time that grows as its square is not
