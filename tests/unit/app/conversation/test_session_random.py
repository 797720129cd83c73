"""Conversations at random: whatever comes in whatever order, the session keeps its promises.

Every sequence follows from its seed; a failure is repeated by running its seed alone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from app.conversation.events import (
    Item,
    ItemDeleted,
    OutputAudio,
    OutputDone,
    OutputStarted,
    OutputText,
    Part,
    ResponseDone,
    ResponseStarted,
    SessionEvent,
    TranscriptWords,
    TurnTraced,
)
from app.conversation.response.spec import ResponseRequest
from app.conversation.session_config import TurnDetection
from app.errors import ClientError
from audio.codecs import PCM16_24K, PCMA_8K, PCMU_8K, AudioFormat, encode
from audio.errors import AudioError
from llm_core import (
    ChatMessage,
    EngineDiedError,
    FirstToken,
    GenerationDone,
    GenerationEvent,
    PrefillResult,
    PromptTooLongError,
    SamplingParams,
    TextDelta,
    Usage,
)
from tests.support.fakes import (
    ManualClock,
    ScriptedEngine,
    ScriptedRecognizer,
    settle,
    silence,
    voice,
)
from tests.support.session_call import Call, call

REPLIES = (
    "One two three four five six seven eight nine ten, eleven twelve thirteen fourteen fifteen.",
    "Twenty letters here.",
    "Yes.",
    "Sure.",
    "Alpha beta gamma, delta epsilon. Zeta eta theta iota kappa lambda! Mu nu xi?",
)
LONG = REPLIES[0]
OUTCOMES = {"answered", "interrupted", "cancelled", "incomplete", "failed", "silent"}
FORMATS = (PCM16_24K, PCMU_8K, PCMA_8K)
MAX_ROUNDS = 400
LETTER_S = 1_000 / 24_000  # how long the tone of a letter lasts


class RandomEngine(ScriptedEngine):
    """Answers at a random pace, with instants of the test's clock, and fails at times."""

    def __init__(self, rng: random.Random, clock: ManualClock) -> None:
        super().__init__(*REPLIES)
        self._rng = rng
        self._clock = clock
        self.failure_rate = 0.0

    async def _think(self) -> None:
        await settle(self._rng.randrange(4))
        if self._rng.random() < 0.2:
            await self._clock.sleep(self._rng.choice((0.02, 0.3)))
        if self._rng.random() < self.failure_rate:
            raise EngineDiedError("as the test wants it")

    async def prefill(self, messages: Sequence[ChatMessage], **options: Any) -> PrefillResult:
        await self._think()
        return await super().prefill(messages, **options)

    async def generate(
        self, messages: Sequence[ChatMessage], params: SamplingParams, **options: Any
    ) -> AsyncGenerator[GenerationEvent, None]:
        self.num_running += 1
        try:
            received_ns = self._clock.now_ns()
            await self._think()
            if self._rng.random() < self.failure_rate:
                raise PromptTooLongError("as the test wants it")
            yield FirstToken(
                received_ns=received_ns,
                scheduled_ns=received_ns,
                first_token_ns=self._clock.now_ns(),
                prompt_tokens=10,
                cached_tokens=4,
            )
            words = self._rng.choice(REPLIES).split(" ")[: params.max_tokens]
            for count, word in enumerate(words, 1):
                await self._think()
                yield TextDelta(text=word if count == 1 else f" {word}", num_tokens=count)
            yield GenerationDone(
                finish_reason="length" if len(words) == params.max_tokens else "stop",
                usage=Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=len(words)),
                num_steps=len(words),
                finished_ns=self._clock.now_ns(),
            )
        finally:
            self.num_running -= 1


class RandomRecognizer(ScriptedRecognizer):
    """Hears words, or nothing, or fails."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def transcribe(self, samples: Any, **hints: Any) -> Any:
        self.texts = [self._rng.choice(("How are you?", "Count.", ""))]
        self.error = AudioError("broken") if self._rng.random() < 0.1 else None
        return super().transcribe(samples, **hints)


class LateExecutor(Executor):
    """Does its jobs some rounds of the loop later, as threads would, but at the seed's pace."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        future: Future[Any] = Future()
        loop = asyncio.get_running_loop()

        def work(rounds: int) -> None:
            if rounds:
                loop.call_soon(work, rounds - 1)
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except Exception as error:
                    future.set_exception(error)

        work(self._rng.randrange(12))
        return future


class Judge:
    """A sink that checks what it gets against the protocol, and against its own player."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.active: str | None = None
        self.ended: set[str] = set()
        self.traces: list[dict[str, Any]] = []
        self.problems: list[BaseException] = []
        self.format = PCM16_24K  # of the active response
        self._open: Item | None = None
        self._has_item = False
        self._is_deleted = False
        self._ends_ns = 0
        self._gaps_ns = 0
        self._started_ns: int | None = None

    async def __call__(self, event: SessionEvent) -> None:
        try:
            self._judge(event)
        except AssertionError as problem:  # raised here it would stop the session instead
            self.problems.append(problem)

    def _judge(self, event: SessionEvent) -> None:
        match event:
            case ResponseStarted(response):
                assert self.active is None, "two responses at once"
                assert response.id not in self.ended
                self.active, self._has_item, self._started_ns = response.id, False, None
            case OutputStarted(response_id, item):
                assert response_id == self.active and not self._has_item
                self._open, self._has_item, self._is_deleted = item, True, False
            case ItemDeleted(item_id) if self._open is not None and item_id == self._open.id:
                self._is_deleted = True  # of what is no longer kept, nothing is cut
            case OutputText(response_id, item_id) | OutputAudio(response_id, item_id):
                assert response_id == self.active
                assert self._open is not None and self._open.id == item_id
                if isinstance(event, OutputAudio):
                    self._play(event.audio)
            case OutputDone(response_id, item):
                assert response_id == self.active and item is self._open
                self._open = None
            case ResponseDone(response):
                assert response.id == self.active and self._open is None
                assert response.status != "in_progress"
                self.active = None
                self.ended.add(response.id)
                if response.output and response.modality == "audio":
                    self._check_text(response.output[0].content[0].text or "", response.status)
            case TurnTraced(turn):
                self.traces.append(turn)
            case TranscriptWords(_, words):
                edges = [edge for word in words for edge in (word.start_ms, word.end_ms)]
                assert edges == sorted(edges), words

    def _play(self, audio: bytes) -> None:
        now = self._clock.now_ns()
        if self._started_ns is None:
            self._started_ns = self._ends_ns = now
            self._gaps_ns = 0
        self._gaps_ns += max(0, now - self._ends_ns)
        length_ns = len(audio) // self.format.sample_len * 1_000_000_000 // self.format.rate
        self._ends_ns = max(now, self._ends_ns) + length_ns

    def sent_s(self) -> float:
        """Audio of the response."""
        if self._started_ns is None:
            return 0.0
        return (self._ends_ns - self._started_ns - self._gaps_ns) / 1e9

    def heard_s(self) -> float:
        """Audio that a player has played by now, gaps not counted."""
        if self._started_ns is None:
            return 0.0
        until_ns = min(self._clock.now_ns(), self._ends_ns)
        return max(0, until_ns - self._started_ns - self._gaps_ns) / 1e9

    def _check_text(self, text: str, status: str) -> None:
        assert any(starts_with_words(reply, text) for reply in REPLIES), text
        if status == "completed":
            assert text in REPLIES
        elif status == "cancelled" and not self._is_deleted:
            check_heard(text, self.heard_s())
        elif status == "failed" and not self._is_deleted:
            # What was sent before it failed still plays, unless somebody speaks.
            assert len(text.strip()) <= self.sent_s() / LETTER_S + 8


def starts_with_words(reply: str, text: str) -> bool:
    """``text`` is a beginning of ``reply`` that cuts no word."""
    rest = reply[len(text) :]
    return reply.startswith(text) and (not text or not rest or text[-1] == " " or rest[0] == " ")


def check_heard(text: str, heard_s: float) -> None:
    """Exact at clauses; inside one the letters share its time, so a long word more or less."""
    letters = heard_s / LETTER_S
    assert letters - 14 <= len(text.strip()) <= letters + 8, (text, letters)


class Driver:
    """Does random things to a session and sees that each call comes back as it should."""

    def __init__(self, rng: random.Random, conversation: Call, judge: Judge) -> None:
        self.rng = rng
        self.c = conversation
        self.judge = judge
        self._num_items = 0

    async def within_bounds(self, work: Awaitable[Any]) -> None:
        """No call waits for time to pass, and only ClientError comes out of it."""
        task = asyncio.ensure_future(work)
        for _ in range(MAX_ROUNDS):
            if task.done():
                break
            await asyncio.sleep(0)
        assert task.done(), "a call does not return"
        if (error := task.exception()) is not None and not isinstance(error, ClientError):
            raise error

    async def step(self) -> None:
        await self.until_started()
        rate = 0.05 if self.rng.random() < 0.3 else 0.0
        self.c.engine.failure_rate = rate  # type: ignore[attr-defined]
        broken = self.rng.random() < 0.05
        self.c.synthesizer.error = AudioError("no voice") if broken else None
        action = self.rng.choice(
            (self.speak, self.speak, self.speak, self.pause, self.pause, self.wait, self.wait)
            + (self.commit, self.clear, self.respond, self.respond, self.cancel)
            + (self.add, self.delete, self.truncate, self.update)
        )
        await action()
        await settle(self.rng.randrange(20))

    async def until_started(self) -> None:
        # A response that is stopped or closed in the very round in which it was made is a case of
        # its own: see the tests below.
        await settle(2)

    async def speak(self) -> None:
        await self.hear(voice(self.rng.choice((0.1, 0.3, 0.7)), self.format.rate))

    async def pause(self) -> None:
        await self.hear(silence(self.rng.choice((0.1, 0.3, 0.7)), self.format.rate))

    @property
    def format(self) -> AudioFormat:
        return self.c.session.config.input_format

    async def hear(self, pcm: bytes) -> None:
        samples = np.frombuffer(pcm, "<i2").astype(np.float32) / 32_768
        payload = encode(samples, self.format)
        # At speaking pace, or all at once as a file would come.
        piece_s = self.rng.choice((0.02, 0.1, 0.1, 5.0))
        step = int(self.format.rate * piece_s) * self.format.sample_len
        for start in range(0, len(payload), step):
            await self.c.clock.advance(min(piece_s, 0.1))
            await self.until_started()
            append = self.c.session.append_audio
            await self.within_bounds(append(payload[start : start + step], self.c.clock.now_ns()))

    async def wait(self) -> None:
        await self.c.clock.advance(self.rng.choice((0.0, 0.05, 0.5, 3.0)))

    async def commit(self) -> None:
        await self.within_bounds(self.c.session.commit_audio())

    async def clear(self) -> None:
        await self.within_bounds(self.c.session.clear_audio())

    async def respond(self) -> None:
        await self.within_bounds(
            self.c.session.create_response(
                ResponseRequest(
                    modality=self.rng.choice((None, None, "text", "audio")),
                    instructions=self.rng.choice((None, "Be kind.", "")),
                    max_output_tokens=self.rng.choice((None, None, 3)),
                )
            )
        )

    async def cancel(self) -> None:
        chosen = self.rng.choice((None, None, self.judge.active, "resp_none"))
        await self.within_bounds(self.c.session.cancel_response(chosen))

    def _item_id(self) -> str:
        ids = [entry.item.id for entry in self.c.session._history._entries]
        return self.rng.choice([*ids, "item_none"])

    async def add(self) -> None:
        self._num_items += 1
        item_id = self.rng.choice((f"item_{self._num_items}", "item_1"))
        item = Item(item_id, "user", [Part("input_text", "And?")])
        previous = self.rng.choice((None, None, "root", self._item_id()))
        await self.within_bounds(self.c.session.add_item(item, previous))

    async def delete(self) -> None:
        await self.within_bounds(self.c.session.delete_item(self._item_id()))

    async def truncate(self) -> None:
        item_id = self._item_id()
        if self.judge._open is not None and self.judge._open.id == item_id:
            return  # see the tests below
        heard_ms = self.rng.choice((0, 200, 900, 60_000))
        await self.within_bounds(self.c.session.truncate_item(item_id, 0, heard_ms))

    async def update(self) -> None:
        rng, config = self.rng, self.c.session.config
        detection = TurnDetection(
            create_response=rng.random() < 0.8, interrupt_response=rng.random() < 0.7
        )
        changes = (
            {"turn_detection": rng.choice((None, detection, detection))},
            {"input_format": rng.choice(FORMATS)},
            {"modality": rng.choice(("text", "audio"))},
            {"instructions": rng.choice(("Be brief.", ""))},
            {"word_timestamps": rng.choice((True, False))},
        )
        await self.within_bounds(self.c.session.update(replace(config, **rng.choice(changes))))


def check_trace(turn: dict[str, Any]) -> None:
    assert turn["outcome"] in OUTCOMES
    assert all(ms >= 0 for ms in turn["instants_ms"].values()), turn
    assert all(ms >= 0 for ms in turn["stages_ms"].values()), turn
    if turn["voice_to_voice_ms"] is not None:
        whole = turn["instants_ms"]["first_audio_sent"]
        assert turn["voice_to_voice_ms"] == pytest.approx(whole)
        assert sum(turn["stages_ms"].values()) == pytest.approx(whole)


def random_call(rng: random.Random, output: AudioFormat, **changes: Any) -> tuple[Any, Any]:
    """A call (see ``call``) in which everything takes a random while, and its engine."""
    clock = ManualClock()
    engine = RandomEngine(rng, clock)
    return call(engine, output_format=output, clock=clock, **changes), clock


@pytest.mark.parametrize("seed", range(40))
async def test_a_conversation_at_random(seed: int) -> None:
    rng = random.Random(seed)
    output = rng.choice(FORMATS)
    opened, clock = random_call(rng, output, settings={"eager_reply": rng.random() < 0.8})
    async with opened as c:
        object.__setattr__(c.services, "workers", late := LateExecutor(rng))
        vars(c.services.speaking).update(_workers=late)
        vars(c.services.recognition).update(_workers=late, _recognizer=RandomRecognizer(rng))
        judge = Judge(clock)
        judge.format = output
        c.sink = judge
        driver = Driver(rng, c, judge)
        for _ in range(40):
            await driver.step()
        if rng.random() < 0.5:  # goes silent: all comes to an end by itself
            c.engine.failure_rate = 0.0  # type: ignore[attr-defined]
            await driver.hear(silence(1.0, driver.format.rate))
            await clock.advance(60)
            assert judge.active is None, "a response without an end"
            assert not c.session._dialog.has_response
        await driver.until_started()
    if judge.problems:
        raise judge.problems[0]
    assert len(judge.traces) == len(judge.ended)
    for turn in judge.traces:
        check_trace(turn)


@pytest.mark.parametrize("means", ["voice", "cancel"])
async def test_what_is_kept_is_what_was_heard(means: str) -> None:
    """At 100 random moments each: the words kept fit the audio that a player has played."""
    rng = random.Random(means)
    num_cut = 0
    for _ in range(100):
        after_s = rng.uniform(0.0, 4.5)
        async with call(ScriptedEngine(LONG), "Stop.", settings={"max_turn_s": 1.0}) as c:
            judge = Judge(c.clock)
            c.sink = judge
            await c.session.create_response()
            await c.clock.advance(after_s)
            if means == "voice":
                await c.hear(voice(0.1))  # heard after 64 ms
            elif judge.active is not None:
                await c.session.cancel_response()
            await settle()
            assert judge.active is None or c.session._responses.running is not None
            if judge.problems:
                raise judge.problems[0]
            kept = "".join(message.content for message in c.messages())
            if judge.heard_s() < len(LONG) * LETTER_S and (
                means == "voice" or judge.active is None
            ):
                response_ended_by_itself = means == "cancel" and kept == LONG
                num_cut += not response_ended_by_itself
                assert starts_with_words(LONG, kept)
                if not response_ended_by_itself:
                    # The voice is noticed up to 40 ms before the clock stops.
                    check_heard(kept, judge.heard_s())
            await c.session.clear_audio()
    assert num_cut > 60


@pytest.mark.parametrize("rounds", range(25))
async def test_hanging_up_in_the_middle_of_anything(rounds: int) -> None:
    """A server that stops cancels the call that is being served, then closes the session."""
    engine = ScriptedEngine(LONG)
    async with call(engine, "Hello?", "Hello?") as c:
        await c.hear(voice(0.6) + silence(0.3))
        tail = c.session.append_audio(silence(0.4), c.clock.now_ns())
        serving = asyncio.create_task(tail)
        await settle(rounds)
        running = c.session._responses.running
        if running is not None and not running._released.is_set():
            await settle(1)  # see test_session_races: closing in the very round of the start
        serving.cancel()
    # `call` checks that no task and no generation is left.


async def test_an_item_deleted_while_it_is_spoken_stays_deleted() -> None:
    async with call(ScriptedEngine(LONG, "Sure."), "Stop.") as c:
        judge = Judge(c.clock)
        c.sink = judge
        await c.session.create_response()
        await c.clock.advance(0.5)
        assert judge._open is not None
        await c.session.delete_item(judge._open.id)
        await c.ask()
        await c.clock.advance(5)
        assert [m.content for m in c.messages()] == ["Stop.", "Sure."]
        assert judge.problems == [] and len(judge.ended) == 2
