"""What a client knows of a turn that turned out not to have ended."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console

from app.cli.talk import render
from app.clients.recording import RATE, Recording, VoicedFrames
from app.clients.talk import CallerAudio, TalkResult
from app.clients.talk_log import Event, TalkLog
from tests.support.fakes import EnergyVad

COMMITTED_A: Event = {"type": "input_audio_buffer.committed", "item_id": "a"}
GONE_A: Event = {"type": "conversation.item.deleted", "item_id": "a"}
TAKEN_BACK: tuple[Event, ...] = (
    COMMITTED_A,
    {"type": "response.created", "response": {"id": "r"}},
    {"type": "response.done", "response": {"id": "r", "status": "cancelled"}},
    GONE_A,
)


def log() -> TalkLog:
    return TalkLog(Recording(np.zeros(10, np.int16)), expects_traces=False)


def test_nothing_is_owed_for_an_utterance_that_goes_on() -> None:
    heard = log()
    heard.feed(COMMITTED_A, 0)
    heard.feed(GONE_A, 0)
    assert heard.turns == [] and heard.num_rejoined == 1


def test_its_answer_is_kept_apart_from_that_to_the_whole() -> None:
    heard = log()
    for event in (
        *TAKEN_BACK,
        COMMITTED_A | {"item_id": "b"},
    ):
        heard.feed(event, 0)
    withdrawn, whole = heard.turns
    assert (withdrawn.is_withdrawn, withdrawn.heard) == (True, {})
    assert not whole.is_withdrawn and whole.awaits_response


def test_a_person_sees_that_it_was_taken_back() -> None:
    heard = log()
    for event in (*TAKEN_BACK,):
        heard.feed(event, 0)
    voiced = VoicedFrames(np.zeros(RATE, np.float32), RATE, EnergyVad())
    audio = CallerAudio(Path("jfk.flac"), np.zeros(RATE, np.int16), voiced, 16_000)
    result = TalkResult(audio, heard.turns, heard.recording, [], [None])
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(render(result, []))
    assert "You     (goes on below)" in capture.get()
    assert "(taken back)" in capture.get() and "(interrupted)" not in capture.get()


def test_an_old_item_that_is_forgotten_withdraws_nothing() -> None:
    heard = log()
    heard.feed(COMMITTED_A, 0)
    heard.feed(GONE_A | {"item_id": "older"}, 0)
    assert heard.num_rejoined == 0 and not heard.turns[0].is_withdrawn


def test_keys_of_a_phone_are_what_the_caller_said() -> None:
    """They come as a text; nothing is owed for it until there is an answer, which an answer that is
    on its way may be."""
    heard = log()
    keys = {"type": "input_text", "text": "[The caller pressed these keys of the phone: 1 2 #]"}
    message = {"id": "k", "type": "message", "role": "user", "content": [keys]}
    heard.feed({"type": "conversation.item.added", "item": message}, 0)
    assert heard.turns == []
    heard.feed({"type": "response.created", "response": {"id": "r"}}, 0)
    assert [turn.transcript for turn in heard.turns] == [keys["text"]]
    heard.feed({"type": "response.created", "response": {"id": "s"}}, 0)
    assert heard.turns[1].transcript == ""


def test_an_utterance_that_was_added_has_its_words_once() -> None:
    heard = log()
    spoken = [{"type": "input_audio", "transcript": None}]
    message = {"id": "a", "type": "message", "role": "user", "content": spoken}
    said = {"item_id": "a", "transcript": "Hello."}
    for event in (
        COMMITTED_A,
        {"type": "conversation.item.added", "item": message},
        {"type": "conversation.item.input_audio_transcription.completed", **said},
        {"type": "response.created", "response": {"id": "r"}},
    ):
        heard.feed(event, 0)
    assert [turn.transcript for turn in heard.turns] == ["Hello."]
