"""The dialog state machine: who has the floor, event by event."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.conversation.turn_taking import (
    Action,
    AnnounceSpeech,
    AssistantState,
    AudioCommitted,
    AudioStarted,
    CallerState,
    CancelRequested,
    CommitTurn,
    CutPlayback,
    DialogEvent,
    DropSpeech,
    DropTranscript,
    InterruptionJudged,
    MergeTurns,
    PausePlayback,
    Phase,
    ResponseFinished,
    ResponseRequested,
    ResumePlayback,
    StartResponse,
    StopResponse,
    TranscriptReady,
    TryTranscript,
    TurnPolicy,
    TurnTaking,
)
from audio.endpointing.vad_endpointer import VoiceEnded, VoicePaused, VoiceResumed, VoiceStarted

START = VoiceStarted(onset_sample=1000, start_sample=500)
PAUSE = VoicePaused(last_voiced_sample=9000)
RESUME = VoiceResumed(sample=12000)
END = VoiceEnded(last_voiced_sample=9000, at_sample=17000)
WORDS, NO_WORDS = TranscriptReady(True), TranscriptReady(False)


def run(dialog: TurnTaking, *events: DialogEvent) -> list[Action]:
    """All actions of the last event; the earlier ones only set the scene."""
    actions: list[Action] = []
    for event in events:
        actions = dialog.feed(event)
    return actions


def test_a_spoken_question_is_answered() -> None:
    dialog = TurnTaking(TurnPolicy())
    assert dialog.phase is Phase.LISTENING
    assert run(dialog, START) == [AnnounceSpeech(500), CutPlayback()]
    assert dialog.phase is Phase.CALLER_SPEAKING
    assert run(dialog, PAUSE) == [TryTranscript(9000)]
    assert dialog.phase is Phase.MAYBE_FINISHED
    assert run(dialog, END) == [CommitTurn(END)]
    assert dialog.phase is Phase.THINKING
    assert run(dialog, WORDS) == [StartResponse()]
    assert run(dialog, AudioStarted()) == []
    assert dialog.phase is Phase.SPEAKING
    assert run(dialog, ResponseFinished()) == []
    assert dialog.phase is Phase.LISTENING


def test_a_pause_in_mid_sentence_drops_the_early_transcript() -> None:
    dialog = TurnTaking(TurnPolicy())
    assert run(dialog, START, PAUSE, RESUME) == [DropTranscript()]
    assert dialog.phase is Phase.CALLER_SPEAKING
    assert run(dialog, PAUSE) == [TryTranscript(9000)]


@pytest.mark.parametrize("progress", [(), (AudioStarted(),)], ids=["thinking", "speaking"])
def test_the_callers_voice_stops_the_answer(progress: tuple[DialogEvent, ...]) -> None:
    dialog = TurnTaking(TurnPolicy())
    run(dialog, START, PAUSE, END, WORDS, *progress)
    assert run(dialog, START) == [AnnounceSpeech(500), StopResponse("turn_detected")]
    assert dialog.phase is Phase.INTERRUPTED
    assert run(dialog, PAUSE, END, WORDS) == [StartResponse()]


def test_a_clap_before_the_first_word_does_not_lose_the_answer() -> None:
    dialog = TurnTaking(TurnPolicy())
    run(dialog, START, PAUSE, END, WORDS, START, PAUSE, END)
    assert run(dialog, NO_WORDS) == [StartResponse()]


def test_a_clap_while_the_transcript_is_made_does_not_lose_the_answer() -> None:
    dialog = TurnTaking(TurnPolicy())
    run(dialog, START, PAUSE, END, START, WORDS, PAUSE, END)
    assert run(dialog, NO_WORDS) == [StartResponse()]


def test_noise_after_the_answer_was_heard_starts_nothing() -> None:
    dialog = TurnTaking(TurnPolicy())
    run(dialog, START, PAUSE, END, WORDS, AudioStarted(), START, PAUSE, END)
    assert run(dialog, NO_WORDS) == []
    assert dialog.phase is Phase.LISTENING


def test_silence_is_not_answered() -> None:
    dialog = TurnTaking(TurnPolicy())
    assert run(dialog, START, PAUSE, END, NO_WORDS) == []
    assert not dialog.has_response


def test_without_create_response_the_client_decides() -> None:
    dialog = TurnTaking(TurnPolicy(create_response=False))
    assert run(dialog, START, PAUSE, END, WORDS) == []
    assert run(dialog, ResponseRequested()) == [StartResponse()]


def test_a_request_waits_for_the_words_of_a_manual_commit() -> None:
    dialog = TurnTaking(TurnPolicy())
    assert run(dialog, AudioCommitted()) == [CommitTurn(None)]
    assert run(dialog, ResponseRequested()) == []
    assert dialog.has_response
    assert run(dialog, NO_WORDS) == [StartResponse()]  # asked for, so it comes


def test_without_interruption_the_next_turn_is_answered_afterwards() -> None:
    dialog = TurnTaking(TurnPolicy(interrupt_response=False))
    run(dialog, START, PAUSE, END, WORDS, AudioStarted())
    assert run(dialog, START) == [AnnounceSpeech(500)]
    assert run(dialog, PAUSE, END, WORDS) == []
    assert run(dialog, ResponseFinished()) == [StartResponse()]
    assert run(dialog, AudioStarted(), ResponseFinished()) == []


def test_cancel_stops_what_runs_and_only_that() -> None:
    dialog = TurnTaking(TurnPolicy())
    assert run(dialog, CancelRequested()) == []
    assert run(dialog, ResponseRequested(), CancelRequested()) == [StopResponse("client_cancelled")]
    run(dialog, START, PAUSE, END)
    assert run(dialog, CancelRequested()) == []  # only words were awaited
    assert run(dialog, WORDS) == []


EVENTS = st.sampled_from(
    [
        START,
        PAUSE,
        RESUME,
        END,
        WORDS,
        NO_WORDS,
        AudioCommitted(),
        ResponseRequested(),
        CancelRequested(),
        AudioStarted(),
        ResponseFinished(),
    ]
)


@given(st.lists(EVENTS, max_size=60), st.booleans(), st.booleans())
def test_whatever_happens_responses_start_and_stop_in_turn(
    events: list[DialogEvent], create: bool, interrupt: bool
) -> None:
    dialog = TurnTaking(TurnPolicy(create, interrupt))
    running = False
    for event in events:
        if isinstance(event, ResponseFinished):
            running = False
        for action in dialog.feed(event):
            match action:
                case StartResponse():
                    assert not running, "two responses at once"
                    running = True
                case StopResponse():
                    assert running, "stopped what does not run"
                    running = False
        assert running == (dialog.bot in (AssistantState.THINKING, AssistantState.SPEAKING))
        if dialog.phase is Phase.LISTENING:
            assert dialog.caller is CallerState.SILENT


# --- the end of a turn that was none ---

JOINING = TurnPolicy(judge_interruptions=True, rejoin_turns=True)
SOON = VoiceStarted(onset_sample=9000 + 16_000, start_sample=9000 + 12_000)
LATE = VoiceStarted(onset_sample=9000 + 20_000, start_sample=9000 + 16_000)


@pytest.mark.parametrize("progress", [(), (WORDS,)], ids=["transcribing", "thinking"])
def test_who_goes_on_before_the_answer_sounds_goes_on_with_the_same_turn(
    progress: tuple[DialogEvent, ...],
) -> None:
    dialog = TurnTaking(JOINING)
    run(dialog, START, PAUSE, END, *progress)
    assert run(dialog, SOON) == [MergeTurns(), AnnounceSpeech(21_000)]
    assert dialog.phase is Phase.CALLER_SPEAKING and not dialog.has_response
    assert run(dialog, WORDS) == [], "the first half is not answered"
    assert run(dialog, PAUSE, END, WORDS) == [StartResponse()]


def test_over_an_answer_that_has_begun_the_words_decide() -> None:
    dialog = TurnTaking(JOINING)
    run(dialog, START, PAUSE, END, WORDS, AudioStarted())
    assert run(dialog, SOON) == [AnnounceSpeech(21_000), PausePlayback()]
    assert run(dialog, InterruptionJudged(is_meant=True)) == [MergeTurns()]
    dialog = TurnTaking(JOINING)
    run(dialog, START, PAUSE, END, WORDS, AudioStarted(), SOON)
    assert run(dialog, InterruptionJudged(is_meant=False)) == [DropSpeech(), ResumePlayback()]
    dialog = TurnTaking(JOINING)
    run(dialog, START, PAUSE, END, WORDS, AudioStarted(), SOON)
    assert run(dialog, END) == [MergeTurns(), CommitTurn(END)]


@pytest.mark.parametrize(
    "rules", [JOINING, TurnPolicy(judge_interruptions=True)], ids=["late", "off"]
)
def test_who_speaks_later_begins_a_turn(rules: TurnPolicy) -> None:
    dialog = TurnTaking(rules)
    run(dialog, START, PAUSE, END, WORDS)
    voice = LATE if rules.rejoin_turns else SOON
    assert run(dialog, voice)[1:] == [StopResponse("turn_detected")]


def test_noise_cannot_keep_a_turn_open_for_ever() -> None:
    dialog = TurnTaking(JOINING)
    end, joined = END, 0
    dialog.feed(START)
    for _ in range(3):
        run(dialog, PAUSE, end, WORDS)
        onset = end.last_voiced_sample + 8_000
        joined += MergeTurns() in dialog.feed(VoiceStarted(onset, onset - 4_000))
        end = VoiceEnded(onset + 1_600, onset + 8_000)
    assert joined == 2


def test_a_response_that_was_asked_for_is_not_part_of_the_turn() -> None:
    dialog = TurnTaking(JOINING)
    run(dialog, START, PAUSE, END, NO_WORDS, ResponseRequested("mine"))
    assert MergeTurns() not in dialog.feed(SOON)
