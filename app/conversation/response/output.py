"""What one answer puts before the client: its messages and calls, paced, and cut to what is heard.

Message items follow one another; calls may begin while a message still plays. All audio of an
answer is one stream to the player:

    played   [item 1 | item 2 | ...]   of each item, what lies in [0, heard) is kept
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from app.clock import Clock
from app.conversation.events import (
    Item,
    ItemDeleted,
    OutputArguments,
    OutputAudio,
    OutputDone,
    OutputStarted,
    OutputText,
    Part,
    Response,
    Sink,
    ToolCall,
)
from app.conversation.history import History, SpokenRecord
from app.conversation.ids import new_id
from app.conversation.response.playout_clock import PlayoutClock
from audio.codecs import AudioFormat, encode
from audio.frame import Samples

_NO_SAMPLES: Samples = np.zeros(0, np.float32)
INTERRUPTED = "interrupted; what came of the call is not known"


@dataclass(frozen=True, slots=True)
class Clause:
    """A piece of the answer. ``samples``: float32 [n] at the output's rate; none when written.

    Clauses of the same ``part`` make one message; the last one has ``is_last``. ``is_filler``: said
    to bridge a wait, and nothing that the model should read. ``is_more``: further samples of the
    clause before. ``length``: of the whole clause as far as it is known; None: ``samples`` are all.
    """

    text: str
    samples: Samples
    part: int = 0
    is_last: bool = False
    is_filler: bool = False
    is_more: bool = False
    length: int | None = None


@dataclass(slots=True)
class _Message:
    item: Item
    spoken: SpokenRecord
    start_sample: int  # of its audio, in the stream to the player
    part: int
    is_told: bool = False  # the client knows that it is over


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Audio of ``message`` that belongs at ``start_sample`` of the stream to the player."""

    message: _Message
    start_sample: int
    samples: Samples

    @property
    def end_sample(self) -> int:
        return self.start_sample + len(self.samples)

    def behind(self, sample: int) -> _Chunk:
        """What of it lies at or behind ``sample``."""
        cut = max(0, sample - self.start_sample)
        return _Chunk(self.message, self.start_sample + cut, self.samples[cut:])


class Output:
    """The items of one response."""

    def __init__(
        self,
        response: Response,
        history: History,
        sink: Sink,
        clock: Clock,
        audio_format: AudioFormat,
        lead_ms: int,
        on_audible: Callable[[Samples, int], None],
    ) -> None:
        """``on_audible`` hears of each chunk float32 [n] that was sent, and when it sounds (ns)."""
        self.is_spoken = response.modality == "audio"
        self.playout = PlayoutClock(audio_format.rate, lead_ms)
        self._response = response
        self._history = history
        self._sink = sink
        self._clock = clock
        self._format = audio_format
        self._on_audible = on_audible
        self._messages: list[_Message] = []
        self._calls: list[Item] = []  # that the client does not know to be over
        self._opened = asyncio.Event()  # a further message
        self._is_stopped = False
        self._may_send = asyncio.Event()  # cleared while the answer is held or catching up
        self._may_send.set()
        self._is_held = False
        self._is_over = False
        self._unheard: deque[_Chunk] = deque()  # sent, and perhaps still in the player
        self._to_repeat: deque[_Chunk] = deque()  # sent, and then thrown away by the player

    @property
    def text(self) -> str:
        """All that was said, as far as it is kept."""
        return " ".join(m.item.content[0].text or "" for m in self._messages)

    @property
    def audio_s(self) -> float:
        """Length of the audio that was sent."""
        return self.playout.sent_samples / self._format.rate

    @property
    def has_been_heard(self) -> bool:
        """A whole word of it was played by now."""
        heard = self.playout.played_samples(self._clock.now_ns())
        return any(
            m.spoken.timeline.heard_text(max(0, heard - m.start_sample)).strip()
            for m in self._messages
        )

    # --- messages ---

    async def say(self, clause: Clause) -> None:
        """Show a clause and play it. Returns when its last sample was sent."""
        message = self._messages[-1] if self._messages else None
        if message is None or message.part != clause.part:
            if clause.is_last and not clause.text and not len(clause.samples):
                return  # nothing was said in this part
            message = await self._open_message(clause)
        length = len(clause.samples) if clause.length is None else clause.length
        if clause.is_more:
            message.spoken.timeline.resize_last(length)
        else:
            message.spoken.timeline.append(clause.text, length)
        await self._write(message, clause.text)
        await self._send(message, clause.samples)
        if clause.is_last:
            await self._tell_done(message, "completed")

    async def say_nothing(self) -> None:
        """An answer without a word is an empty message, if it is not a call."""
        if not self._response.output:
            await self._open_message(Clause("", _NO_SAMPLES))

    async def until_open(self, part: int) -> None:
        """Wait until the message of ``part`` exists."""
        while not any(message.part == part for message in self._messages):
            self._opened.clear()
            await self._opened.wait()

    async def _open_message(self, clause: Clause) -> _Message:
        kind: Literal["output_audio", "output_text"] = (
            "output_audio" if self.is_spoken else "output_text"
        )
        item = Item(new_id("item"), "assistant", [Part(kind, "")], "in_progress")
        spoken = SpokenRecord(self._format.rate)
        # Audio that a pause discarded is sent again before the new message's.
        pending = sum(len(chunk.samples) for chunk in self._to_repeat)
        message = _Message(item, spoken, self.playout.sent_samples + pending, clause.part)
        self._messages.append(message)
        await self._add(item, spoken, is_for_model=not clause.is_filler)
        self._opened.set()
        return message

    async def _add(
        self, item: Item, spoken: SpokenRecord | None = None, *, is_for_model: bool = True
    ) -> None:
        previous = self._history.append_own(item, is_for_model=is_for_model)
        if spoken is not None and self.is_spoken:
            self._history.attach_audio(item.id, spoken)
        self._response.output.append(item)
        if self._response.in_conversation:
            for evicted in self._history.take_evicted():
                await self._sink(ItemDeleted(evicted))
        await self._sink(OutputStarted(self._response.id, item, previous))

    async def _write(self, message: _Message, text: str) -> None:
        if not text:
            return
        part = message.item.content[0]
        if message.spoken.kept_samples is None:  # else the client has cut it already
            part.text = (part.text or "") + text
        if not self.is_spoken:
            self._on_audible(_NO_SAMPLES, self._clock.now_ns())
        await self._sink(OutputText(self._response.id, message.item.id, text))

    async def _send(self, message: _Message, samples: Samples) -> None:
        """Send audio in pieces of 100 ms, never further ahead of its playout than the lead."""
        step = self._format.rate // 10
        for start in range(0, len(samples), step):
            while True:
                await self._may_send.wait()
                wait_s = self.playout.wait_s(self._clock.now_ns())
                if not wait_s:
                    break
                await self._clock.sleep(wait_s)
            if self._is_stopped:
                return  # woken in the very moment of `stop`, before the cancellation arrived
            chunk = samples[start : start + step]
            await self._send_chunk(_Chunk(message, self.playout.sent_samples, chunk))

    async def _send_chunk(self, chunk: _Chunk) -> None:
        item, spoken = chunk.message.item, chunk.message.spoken
        audio = encode(chunk.samples, self._format)
        sounds_ns = self.playout.sent(len(chunk.samples), self._clock.now_ns())
        self._unheard.append(chunk)
        spoken.send(len(chunk.samples))
        if spoken.kept_samples is None:
            item.content[0].audio_ms = spoken.sent_ms
        self._forget_heard()
        await self._sink(OutputAudio(self._response.id, item.id, audio))
        self._on_audible(chunk.samples, sounds_ns)

    def _forget_heard(self) -> None:
        heard = self.playout.played_samples(self._clock.now_ns())
        while self._unheard and self._unheard[0].end_sample <= heard:
            self._unheard.popleft()

    # --- held, because the caller may want to speak ---

    def hold(self) -> bool:
        """Be silent at once. The player throws away what it has not played. False when it is too
        late: what is thrown away could not be sent again."""
        if self._is_over or self._is_stopped:
            return False
        if self._is_held:
            return True
        self._is_held = True
        self._may_send.clear()
        heard = self.playout.hold(self._clock.now_ns())
        lost = [chunk.behind(heard) for chunk in self._unheard if chunk.end_sample > heard]
        self._unheard.clear()
        self._to_repeat.extendleft(reversed(lost))
        for message in self._messages:
            message.spoken.discard_after(max(0, heard - message.start_sample))
        return True

    async def release(self) -> None:
        """Resume where playback stopped, to the sample. Returns when all of that was sent again.

        A response that has ended meanwhile stays cut.
        """
        if self._is_over or self._is_stopped:
            return
        self._is_held = False
        for message in self._messages:
            self._restore(message)
        while self._to_repeat and not (self._is_held or self._is_stopped):
            if wait_s := self.playout.wait_s(self._clock.now_ns()):
                await self._clock.sleep(wait_s)
                continue
            await self._send_chunk(self._to_repeat.popleft())
        if not self._is_held:
            self._may_send.set()

    def _restore(self, message: _Message) -> None:
        """What the client cut when it fell silent is said after all."""
        spoken, item = message.spoken, message.item
        if spoken.kept_samples is not None:
            spoken.kept_samples = None
            item.content[0].text = spoken.timeline.text
            item.content[0].audio_ms = spoken.sent_ms
            item.status = "completed" if message.is_told else "in_progress"

    # --- calls ---

    async def open_call(self, call: ToolCall) -> Item:
        """The model begins a call; the client hears of it at once."""
        item = Item(new_id("item"), "assistant", status="in_progress", call=call)
        self._calls.append(item)
        await self._add(item)
        return item

    async def add_arguments(self, item: Item, text: str) -> None:
        """More of the call's arguments."""
        assert item.call is not None
        item.call.arguments += text
        await self._sink(OutputArguments(self._response.id, item.id, text))

    async def close_call(self, item: Item, status: Literal["completed", "incomplete"]) -> None:
        """The call is whole; one of ours has run."""
        item.status = status
        self._calls.remove(item)
        await self._sink(OutputDone(self._response.id, item, self._history.previous_id(item.id)))

    # --- the end ---

    async def finish(self) -> None:
        """All was said. Returns when what is held has been sent after all; then the response may
        end, and the answer cannot be held any more."""
        while not self._may_send.is_set():  # it may be held again before we run
            await self._may_send.wait()
        self._is_over = True

    def stop(self) -> None:
        """No sample leaves after this call."""
        self._is_stopped = True

    def cut_to_heard(self) -> None:
        """Cut history to what was heard by now. No-op once all of it was."""
        now = self._clock.now_ns()
        if self.playout.is_playing(now):
            self._cut(self.playout.played_samples(now))

    def end(self, status: Literal["cancelled", "failed"]) -> None:
        """The answer ends before its time: what is open is incomplete.

        A failed answer is not taken back: the client plays what it has.
        """
        self._is_over = True
        self._to_repeat.clear()
        for message in self._messages:
            if not message.is_told:
                message.item.status = "incomplete"
        for item in self._calls:
            assert item.call is not None
            item.status = "incomplete"
            if item.call.runs_here:
                item.call.error = INTERRUPTED
        heard = self.playout.played_samples(self._clock.now_ns())
        self._cut(heard if status == "cancelled" else self.playout.sent_samples)

    async def tell_end(self, status: Literal["completed", "incomplete"]) -> None:
        """Tell the client that all items are over; ``status`` is for those still in progress."""
        for message in self._messages:
            if not message.is_told:
                await self._tell_done(message, status)
        for item in [*self._calls]:
            await self.close_call(item, "incomplete")

    async def _tell_done(
        self, message: _Message, status: Literal["completed", "incomplete"]
    ) -> None:
        message.is_told = True
        item = message.item
        if item.status == "in_progress":
            is_cut = message.spoken.kept_samples is not None
            item.status = "incomplete" if is_cut else status
        await self._sink(OutputDone(self._response.id, item, self._history.previous_id(item.id)))

    def _cut(self, heard_samples: int) -> None:
        """``heard_samples`` of the whole stream; messages that were heard to their end stay."""
        for message in self._messages:
            heard = max(0, heard_samples - message.start_sample)
            if not message.is_told or heard < message.spoken.timeline.total_samples:
                self._history.cut(message.item.id, heard)
