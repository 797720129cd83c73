"""The items of one response, by hand: what is held is sent before the response may end."""

from __future__ import annotations

import asyncio

import numpy as np

from app.conversation.events import OutputAudio, Response, SessionEvent
from app.conversation.history import History
from app.conversation.response.output import Clause, Output
from audio.codecs import AudioFormat
from tests.support.fakes import ManualClock, settle

RATE = 24_000
PCM16 = AudioFormat("pcm16", RATE)


class Heard:
    """An answer of one clause of ``seconds``, and what its client gets."""

    def __init__(self, seconds: float) -> None:
        self.clock = ManualClock()
        self.bytes_sent = 0
        self.clause = Clause("Yes.", np.ones(int(seconds * RATE), np.float32), is_last=True)
        response = Response("resp_1", "audio")
        self.output = Output(
            response, History(), self.sink, self.clock, PCM16, 60_000, lambda *_: None
        )

    async def sink(self, event: SessionEvent) -> None:
        if isinstance(event, OutputAudio):
            self.bytes_sent += len(event.audio)

    @property
    def sent_s(self) -> float:
        return self.bytes_sent / 2 / RATE


async def test_an_answer_that_is_held_when_all_was_said_ends_when_it_was_sent_again() -> None:
    heard = Heard(2.0)
    await heard.output.say(heard.clause)
    await heard.clock.advance(0.5)
    assert heard.output.hold()
    ending = asyncio.create_task(heard.output.finish())
    await settle()
    assert not ending.done(), "what the player threw away was not sent again"
    await heard.output.release()
    await ending
    assert abs(heard.sent_s - 3.5) < 0.01, "2.0 s, and the 1.5 s that nobody heard"


async def test_it_may_be_held_again_in_the_moment_in_which_it_goes_on() -> None:
    heard = Heard(2.0)
    await heard.output.say(heard.clause)
    heard.output.hold()
    ending = asyncio.create_task(heard.output.finish())
    await settle()
    await heard.output.release()
    assert heard.output.hold()
    await settle()
    assert not ending.done()
    await heard.output.release()
    await ending


async def test_an_answer_whose_end_is_told_cannot_be_held() -> None:
    heard = Heard(2.0)
    await heard.output.say(heard.clause)
    await heard.output.finish()
    before_s = heard.sent_s
    assert not heard.output.hold()
    await heard.output.release()
    assert heard.sent_s == before_s


async def test_nothing_is_sent_again_of_an_answer_that_failed_while_it_was_held() -> None:
    heard = Heard(2.0)
    await heard.output.say(heard.clause)
    heard.output.hold()
    heard.output.end("failed")
    before_s = heard.sent_s
    await heard.output.release()
    assert heard.sent_s == before_s
