"""Stand-ins for models and time, maintained like any other code. No user's path uses them."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from app.config import Settings
from app.conversation.eager_admission import EagerAdmission
from app.conversation.events import SessionEvent
from app.conversation.services import Services
from app.conversation.speech.asr_scheduler import AsrScheduler
from app.conversation.speech.tts_scheduler import TtsScheduler
from app.conversation.tools import ToolBox
from app.observe.loop_lag import LoopLag
from app.observe.metrics import Metrics
from app.observe.query import TraceFilter, TraceQuery
from app.observe.store import TraceStore, Turn
from app.observe.turn_audio import TurnAudio
from app.observe.writer import TraceWriter
from audio.asr.hallucination_filter import PunctuationLogprobs
from audio.asr.recognizer import Transcript
from audio.asr.word_timing import WordTime
from audio.tts.synthesizer import SpeechPiece
from audio.vad import VadWindows
from llm_core import (
    Alternative,
    ChatMessage,
    EngineStats,
    FirstToken,
    GenerationDone,
    GenerationEvent,
    Guide,
    ModelInfo,
    OptionFields,
    PrefillResult,
    SamplingParams,
    TextDelta,
    TokenLogprob,
    Usage,
)

Samples = npt.NDArray[np.float32]


class ManualClock:
    """Time that moves only when a test says so. Sleepers wake in the order of their deadlines."""

    def __init__(self) -> None:
        self._now_ns = 1_000_000_000
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._serial = 0

    def now_ns(self) -> int:
        return self._now_ns

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self._serial += 1
        heapq.heappush(self._sleepers, (self._now_ns + int(seconds * 1e9), self._serial, future))
        await future

    async def advance(self, seconds: float) -> None:
        """Move time on, waking sleepers at their own instants, and let everything settle."""
        end = self._now_ns + int(seconds * 1e9)
        await settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            at, _, future = heapq.heappop(self._sleepers)
            self._now_ns = max(self._now_ns, at)
            if not future.done():
                future.set_result(None)
            await settle()
        self._now_ns = end


async def settle(rounds: int = 50) -> None:
    """Let every task that can run do so."""
    for _ in range(rounds):
        await asyncio.sleep(0)


class InlineExecutor(ThreadPoolExecutor):
    """Runs jobs at once on the calling thread: no thread, no race."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class EnergyVad:
    """Voice is what is loud. Same interface as ``VadModel``."""

    def run(self, window: Samples, h: Samples, c: Samples) -> tuple[float, Samples, Samples]:
        rms = float(np.sqrt(np.mean(window[:, -512:] ** 2)))
        return (1.0 if rms > 0.01 else 0.0), h, c

    def probabilities(self, samples: Samples) -> Samples:
        windows = np.zeros((-(-samples.size // 512), 512), np.float32)
        windows.reshape(-1)[: samples.size] = samples
        return (np.sqrt(np.mean(windows**2, axis=1)) > 0.01).astype(np.float32)


_A_STOP = PunctuationLogprobs(-0.05, -4.0, -5.0, -6.0, -6.0, -5.0)
_NO_STOP = PunctuationLogprobs(-4.0, -6.0, -6.0, -2.0, -3.0, -1.0)


class ScriptedRecognizer:
    """Hears the next of ``texts`` in every piece of audio; nothing in silence."""

    languages: tuple[str, ...] = ("en",)

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.heard_s: list[float] = []
        self.told: list[str | None] = []  # the languages
        self.error: Exception | None = None
        self.align_error: Exception | None = None

    def transcribe(
        self,
        samples: Samples,
        *,
        windows: VadWindows | None = None,
        prompt: str | None = None,
        language: str | None = None,
        keep_encoder_output: bool = False,
        skip_thorough: bool = False,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Transcript:
        if self.error is not None:
            raise self.error
        self.heard_s.append(len(samples) / 16_000)
        self.told.append(language)
        text = self.texts.pop(0) if self.texts else ""
        return Transcript(
            text=text,
            audio_s=len(samples) / 16_000,
            avg_logprob=-0.1,
            no_speech_prob=0.0,
            compression_ratio=1.0,
            encoder_frames=100,
            num_fallbacks=0,
            took_ms=1.0,
            punctuation=_A_STOP if text.endswith((".", "?", "!")) else _NO_STOP,
        )

    def align_words(
        self, transcript: Transcript, *, is_wanted: Callable[[], bool] = lambda: True
    ) -> tuple[WordTime, ...]:
        """Each word lasts a tenth of a second."""
        if self.align_error is not None:
            raise self.align_error
        words = transcript.text.split()
        return tuple(WordTime(word, at / 10, (at + 1) / 10) for at, word in enumerate(words))


class ToneSynthesizer:
    """Speaks a tone: 1,000 samples a character at 24 kHz, in two pieces when it is urgent.

    A fake of its own needs no more than ``synthesize``.
    """

    sample_rate = 24_000

    def __init__(self) -> None:
        self.spoken: list[str] = []
        self.error: Exception | None = None

    def synthesize(self, text: str, *, speed: float = 1.0) -> Samples:
        if self.error is not None:
            raise self.error
        self.spoken.append(text)
        return np.full(1_000 * len(text.strip()), 0.5, np.float32)

    def stream(
        self, text: str, *, speed: float = 1.0, is_urgent: bool = True
    ) -> Iterator[SpeechPiece]:
        samples = self.synthesize(text, speed=speed)
        cut = len(samples) // 4 if is_urgent else 0
        if cut:  # how long the whole is can only be guessed by then
            yield SpeechPiece(samples[:cut], len(samples) + 100)
        yield SpeechPiece(samples[cut:], len(samples), is_last=True)


class ScriptedReply:
    """Same interface as the engine client's ``Reply``. Keeps all deadlines, the first one too."""

    def __init__(
        self, events: AsyncGenerator[GenerationEvent, None], options: OptionFields
    ) -> None:
        self.options = options
        self.deadlines_ns = [options.get("deadline_ns")]
        self._events = events

    async def __aenter__(self) -> ScriptedReply:
        return self

    async def __aexit__(self, *reason: object) -> None:
        await self._events.aclose()

    def __aiter__(self) -> ScriptedReply:
        return self

    async def __anext__(self) -> GenerationEvent:
        return await anext(self._events)

    def set_deadline(self, deadline_ns: int | None) -> None:
        self.deadlines_ns.append(deadline_ns)


class ScriptedEngine:
    """Answers word by word, the n-th request with the n-th reply, further ones with the last.

    ``gate`` holds it before the next word. ``error`` is raised before the first one, or after
    ``words_before_error`` of them. A reply may hold calls, as
    ``<tool_call>{"name": "f", "arguments": {}}</tool_call>``.

    ``by_turn``: replies go by the number of the caller's messages instead, so that an answer begun
    in vain takes none.

    Asked how likely a message is to end (see ``turn_judge``), it says ``end_logprob`` and counts
    no request.
    """

    info = ModelInfo(
        name="scripted",
        context_len=1000,
        vocab_size=100,
        num_layers=1,
        weight_format="none",
        num_threads=1,
    )
    is_alive = True
    problem = ""

    def __init__(self, *replies: str) -> None:
        self.replies = list(replies)
        self.requests: list[list[ChatMessage]] = []
        self.prefills: list[list[ChatMessage]] = []
        self.params: list[SamplingParams] = []
        self.options: list[OptionFields] = []
        self.guides: list[Guide] = []
        self.guide_error: Exception | None = None
        self.replies_opened: list[ScriptedReply] = []
        self.num_running = 0
        self.error: Exception | None = None
        self.end_logprob = -0.2
        self.judged: list[str] = []
        self.words_before_error = 0
        self.by_turn = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def stats(self) -> EngineStats:
        return EngineStats(
            num_running=self.num_running,
            num_waiting=0,
            num_drafts=0,
            num_blocks=64,
            num_free_blocks=64 - 8 * self.num_running,
            num_pinned_blocks=0,
            cached_tokens=0,
            total_prompt_tokens=20,
            total_hit_tokens=8,
        )

    async def prepare_guide(self, guide: Guide) -> None:
        self.guides.append(guide)
        if self.guide_error is not None:
            raise self.guide_error

    async def prefill(self, messages: Sequence[ChatMessage], **options: Any) -> PrefillResult:
        self.prefills.append(list(messages))
        return PrefillResult(prompt_tokens=10, cached_tokens=0)

    async def open_reply(
        self, messages: Sequence[ChatMessage], params: SamplingParams, **options: Any
    ) -> ScriptedReply:
        """``generate`` with a handle, which is kept."""
        reply = ScriptedReply(
            self.generate(messages, params, **options), cast(OptionFields, options)
        )
        self.replies_opened.append(reply)
        return reply

    async def generate(
        self, messages: Sequence[ChatMessage], params: SamplingParams, **options: Any
    ) -> AsyncGenerator[GenerationEvent, None]:
        if params.continue_last and params.logprobs is not None:
            self.judged.append(messages[-1].content)
            top = (Alternative(b".", self.end_logprob),)
            said = (TokenLogprob(token=b".", logprob=self.end_logprob, top=top),)
            yield TextDelta(text=".", num_tokens=1, logprobs=said)
            return
        self.requests.append(list(messages))
        self.params.append(params)
        self.options.append(cast(OptionFields, options))
        number = len(self.requests)
        if self.by_turn:
            number = max(1, sum(message.role == "user" for message in messages))
        self.num_running += 1
        try:
            if self.error is not None and not self.words_before_error:
                raise self.error
            yield FirstToken(
                received_ns=0, scheduled_ns=1, first_token_ns=2, prompt_tokens=10, cached_tokens=4
            )
            words = self.replies[min(number, len(self.replies)) - 1].split(" ")
            for count, word in enumerate(words, 1):
                await self.gate.wait()
                if self.error is not None and count > self.words_before_error:
                    raise self.error
                if count > params.max_tokens:
                    break
                yield TextDelta(text=word if count == 1 else f" {word}", num_tokens=count)
            done = min(len(words), params.max_tokens)
            yield GenerationDone(
                finish_reason="stop" if done == len(words) else "length",
                usage=Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=done),
                num_steps=done,
                finished_ns=3,
            )
        finally:
            self.num_running -= 1


class PacedEngine(ScriptedEngine):
    """Takes its time, by the test's clock: waits in the queue, reads the prompt, then each word."""

    def __init__(self, clock: ManualClock, *replies: str) -> None:
        super().__init__(*replies)
        self.clock = clock
        self.queue_s, self.prefill_s, self.token_s = 0.002, 0.04, 0.01

    async def generate(
        self, messages: Sequence[ChatMessage], params: SamplingParams, **options: Any
    ) -> AsyncGenerator[GenerationEvent, None]:
        received_ns = self.clock.now_ns()
        await self.clock.sleep(self.queue_s)
        scheduled_ns = self.clock.now_ns()
        async with aclosing(super().generate(messages, params, **options)) as events:
            async for event in events:
                match event:
                    case FirstToken():
                        await self.clock.sleep(self.prefill_s)
                        yield msgspec.structs.replace(
                            event,
                            received_ns=received_ns,
                            scheduled_ns=scheduled_ns,
                            first_token_ns=self.clock.now_ns(),
                        )
                    case TextDelta():
                        await self.clock.sleep(self.token_s)
                        yield event
                    case GenerationDone():
                        yield msgspec.structs.replace(event, finished_ns=self.clock.now_ns())


class PacedExecutor(Executor):
    """Speech work that takes as long, by the test's clock, as ``delays_s`` says for its kind.

    A delay may be a function of the job.
    """

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.delays_s: dict[str, float | Callable[[Any], float]] = {
            "transcribe": 0.08,
            "align_words": 0.02,
            "_synthesize_first": 0.05,
            "_synthesize_next": 0.0,
            "_acoustic_features": 0.0,
        }
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        future: Future[Any] = Future()
        name = getattr(fn, "func", fn).__name__
        task = asyncio.create_task(self._work(future, name, partial(fn, *args, **kwargs)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return future

    async def _work(self, future: Future[Any], name: str, job: partial[Any]) -> None:
        delay = self.delays_s[name]
        await self.clock.sleep(delay(job) if callable(delay) else delay)
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)

    async def close(self) -> None:
        """Nobody waits for what is left."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Recorder:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[SessionEvent] = []

    async def __call__(self, event: SessionEvent) -> None:
        self.events.append(event)

    def of(self, *kinds: type) -> list[Any]:
        return [e for e in self.events if isinstance(e, kinds)]

    def names(self) -> list[str]:
        return [type(e).__name__ for e in self.events]


class InlineWriter(TraceWriter):
    """Writes at once, on the calling thread."""

    def add(self, turn: Turn, audio: TurnAudio | None = None) -> None:
        self.write([turn])
        if audio is not None and self.recordings is not None:
            self.recordings.write(turn["turn_id"], audio.to_wav())
        self.store.prune()


def recent(store: TraceStore, limit: int) -> list[Turn]:
    """The newest turns, newest first."""
    return TraceQuery(store).page(TraceFilter(), limit).turns


def fake_services(
    engine: ScriptedEngine,
    recognizer: ScriptedRecognizer | None = None,
    synthesizer: ToneSynthesizer | None = None,
    tools: ToolBox | None = None,
    workers: Executor | None = None,
    **settings: Any,
) -> Services:
    """Services without a model in them. Scripted transcripts are those of whole turns."""
    workers = workers or InlineExecutor(1)
    recognition = AsrScheduler(cast(Any, recognizer or ScriptedRecognizer()), workers)
    known = Settings.model_validate({"partial_transcripts": False, **settings})
    metrics = Metrics()
    return Services(
        engine=cast(Any, engine),
        recognition=recognition,
        load=EagerAdmission(recognition, known.eager_max_generating),
        speaking=TtsScheduler(workers),
        synthesizer=cast(Any, synthesizer or ToneSynthesizer()),
        vad=cast(Any, EnergyVad()),
        workers=workers,
        traces=InlineWriter(
            TraceStore.in_memory(100), store_transcripts=True, sinks=[metrics.observe]
        ),
        metrics=metrics,
        loop_lag=LoopLag(),
        settings=known,
        tools=tools or ToolBox(),
    )


def voice(seconds: float, rate: int = 24_000) -> bytes:
    """Loud PCM16."""
    t = np.arange(int(seconds * rate)) / rate
    return (np.sin(2 * np.pi * 220 * t) * 8_000).astype("<i2").tobytes()


def silence(seconds: float, rate: int = 24_000) -> bytes:
    """Digital silence in PCM16."""
    return bytes(2 * int(seconds * rate))
