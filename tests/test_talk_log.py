"""What a client knows of a turn that turned out not to have ended."""

from __future__ import annotations

import numpy as np

from app.recording import Recording
from app.talk_log import Event, TalkLog

COMMITTED_A: Event = {"type": "input_audio_buffer.committed", "item_id": "a"}
GONE_A: Event = {"type": "conversation.item.deleted", "item_id": "a"}


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
        COMMITTED_A,
        {"type": "response.created", "response": {"id": "r"}},
        {"type": "response.done", "response": {"id": "r", "status": "cancelled"}},
        GONE_A,
        COMMITTED_A | {"item_id": "b"},
    ):
        heard.feed(event, 0)
    withdrawn, whole = heard.turns
    assert (withdrawn.is_withdrawn, withdrawn.heard) == (True, {})
    assert not whole.is_withdrawn and whole.awaits_response


def test_an_old_item_that_is_forgotten_withdraws_nothing() -> None:
    heard = log()
    heard.feed(COMMITTED_A, 0)
    heard.feed(GONE_A | {"item_id": "older"}, 0)
    assert heard.num_rejoined == 0 and not heard.turns[0].is_withdrawn
