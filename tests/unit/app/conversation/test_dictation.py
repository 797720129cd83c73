"""Files and texts are worked on behind everything that callers wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from app.clock import MonotonicClock
from app.conversation.speech import asr_scheduler as queue
from app.conversation.speech.asr_scheduler import AsrPriority, AsrScheduler
from app.conversation.speech.batch_synthesis import synthesize_text
from app.conversation.speech.batch_transcription import TranscribedPiece, transcribe_recording
from app.conversation.speech.tts_scheduler import TtsScheduler
from app.errors import RecognitionError, SynthesisError
from audio.asr.recognizer import Transcript
from audio.errors import AbandonedError, ModelError
from audio.frame import Samples
from tests.support.fakes import (
    EnergyVad,
    InlineExecutor,
    ScriptedEngine,
    ScriptedRecognizer,
    ToneSynthesizer,
    fake_services,
)
from tests.support.rtc_client import until

RATE = 16_000


def voice(seconds: float) -> Samples:
    at = np.arange(int(seconds * RATE)) / RATE
    return (0.3 * np.sin(2 * np.pi * 200 * at)).astype(np.float32)


class SteppedRecognizer(ScriptedRecognizer):
    """Waits in the middle of each piece, then looks whether to go on."""

    def __init__(self, *texts: str) -> None:
        super().__init__(*texts)
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.briefs: list[bool] = []

    def transcribe(
        self,
        samples: Samples,
        *,
        skip_thorough: bool = False,
        is_wanted: Callable[[], bool] = lambda: True,
        **hints: Any,
    ) -> Transcript:
        self.briefs.append(skip_thorough)
        self.begun.release()
        assert self.go_on.acquire(timeout=10)
        if not is_wanted():
            raise AbandonedError("given up")
        return super().transcribe(samples)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as workers:
        yield workers


async def begun(recognizer: SteppedRecognizer) -> None:
    assert await asyncio.to_thread(partial(recognizer.begun.acquire, timeout=10))


async def all_of(
    recognition: AsrScheduler, samples: Samples, **options: Any
) -> list[TranscribedPiece]:
    vad = cast(Any, EnergyVad())
    return [piece async for piece in transcribe_recording(recognition, vad, samples, **options)]


# --- pieces ---


async def test_a_file_is_heard_in_pieces_that_are_cut_at_pauses() -> None:
    recognizer = ScriptedRecognizer("One.", "", "Three.")
    recognition = AsrScheduler(cast(Any, recognizer), InlineExecutor(1))
    samples = np.concatenate([voice(6.5), np.zeros(RATE, np.float32), voice(12.0)])
    pieces = await all_of(recognition, samples, wants_words=True)
    assert [piece.text for piece in pieces] == ["One.", "", "Three."]
    assert sum(recognizer.heard_s) == pytest.approx(19.5)
    assert max(recognizer.heard_s) <= 8.0
    assert 6.5 <= pieces[0].end_s <= 7.5, "in the pause"
    assert [piece.start_s for piece in pieces[1:]] == [piece.end_s for piece in pieces[:-1]]
    assert pieces[-1].end_s == 19.5
    (word,) = pieces[2].words
    assert (word.word, word.start_s) == ("Three.", pieces[2].start_s)


async def test_no_words_are_timed_when_nobody_asks() -> None:
    recognition = AsrScheduler(cast(Any, ScriptedRecognizer("One.")), InlineExecutor(1))
    (piece,) = await all_of(recognition, voice(1.0))
    assert piece.words == ()


async def test_a_file_without_samples_has_no_pieces() -> None:
    recognition = AsrScheduler(cast(Any, ScriptedRecognizer()), InlineExecutor(1))
    assert await all_of(recognition, voice(0.0)) == []


async def test_a_failure_is_told() -> None:
    recognizer = ScriptedRecognizer("One.")
    recognizer.error = ModelError("broken")
    recognition = AsrScheduler(cast(Any, recognizer), InlineExecutor(1))
    with pytest.raises(RecognitionError, match="broken"):
        await all_of(recognition, voice(1.0))


# --- behind callers ---


@pytest.mark.parametrize("urgency", [AsrPriority.FINAL, AsrPriority.EARLY, AsrPriority.PARTIAL])
async def test_a_piece_of_a_file_gives_way_and_is_done_again(
    pool: ThreadPoolExecutor, urgency: AsrPriority
) -> None:
    recognizer = SteppedRecognizer("the caller", "the file")
    recognition = AsrScheduler(cast(Any, recognizer), pool)
    file = recognition.submit(voice(2.0), AsrPriority.FILE)
    await begun(recognizer)
    assert not recognition.is_busy, "for somebody who speaks"
    live = recognition.submit(voice(1.0), urgency)
    recognizer.go_on.release()  # the file looks whether it is wanted
    await begun(recognizer)
    assert recognition.is_busy
    recognizer.go_on.release()
    assert (await live.result).text == "the caller"
    await begun(recognizer)
    recognizer.go_on.release()
    assert (await file.result).text == "the file"
    assert recognizer.briefs == [True, False, True]
    assert recognition.num_refused == 0


async def test_no_piece_of_a_file_is_begun_while_somebody_speaks(pool: ThreadPoolExecutor) -> None:
    recognizer = SteppedRecognizer("the caller", "the file")
    recognizer.go_on.release(2)
    recognition = AsrScheduler(cast(Any, recognizer), pool)
    recognition.change_num_live_turns(+1)
    file = recognition.submit(voice(2.0), AsrPriority.FILE)
    live = recognition.submit(voice(1.0), AsrPriority.FINAL)
    assert (await live.result).text == "the caller"
    assert recognizer.heard_s == [1.0] and not file.result.done()
    recognition.change_num_live_turns(+1)
    recognition.change_num_live_turns(-1)
    assert not recognition.is_busy and len(recognizer.briefs) == 1, "one still speaks"
    recognition.change_num_live_turns(-1)
    assert (await file.result).text == "the file"


async def test_a_file_does_not_wait_for_ever(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_MAX_FILE_DELAY_S", 0.05)
    recognition = AsrScheduler(cast(Any, ScriptedRecognizer("one", "two")), pool)
    recognition.change_num_live_turns(+1)  # and never less
    files = [recognition.submit(voice(1.0), AsrPriority.FILE) for _ in range(2)]
    async with asyncio.timeout(10):
        assert [(await file.result).text for file in files] == ["one", "two"]


async def test_what_is_finished_in_that_moment_counts(pool: ThreadPoolExecutor) -> None:
    class Stubborn(SteppedRecognizer):
        def transcribe(self, samples: Samples, **hints: Any) -> Transcript:
            return super().transcribe(samples)  # does not look

    recognizer = Stubborn("the file", "the caller")
    recognition = AsrScheduler(cast(Any, recognizer), pool)
    file = recognition.submit(voice(2.0), AsrPriority.FILE)
    await begun(recognizer)
    live = recognition.submit(voice(1.0), AsrPriority.FINAL)
    recognizer.go_on.release()
    assert (await file.result).text == "the file"
    recognizer.go_on.release()
    assert (await live.result).text == "the caller"
    assert len(recognizer.heard_s) == 2


async def test_a_file_that_nobody_waits_for_is_given_up(pool: ThreadPoolExecutor) -> None:
    recognizer = SteppedRecognizer("never")
    recognition = AsrScheduler(cast(Any, recognizer), pool)
    reading = asyncio.create_task(all_of(recognition, voice(30.0)))
    await begun(recognizer)
    reading.cancel()
    await asyncio.wait([reading])
    recognizer.go_on.release()
    live = recognition.submit(voice(1.0), AsrPriority.FINAL)
    recognizer.go_on.release()
    await live.result
    assert recognizer.heard_s == [1.0], "nothing of the file was heard to its end"
    assert recognition.num_waiting == 0


async def test_files_do_not_stand_in_the_way_of_hope(pool: ThreadPoolExecutor) -> None:
    recognizer = SteppedRecognizer("a", "b", "c")
    recognition = AsrScheduler(cast(Any, recognizer), pool)
    files = [recognition.submit(voice(1.0), AsrPriority.FILE) for _ in range(3)]
    await begun(recognizer)
    assert recognition.num_waiting == 0
    for _ in files:
        recognizer.go_on.release()
    await asyncio.gather(*(job.result for job in files))


async def test_files_take_turns(pool: ThreadPoolExecutor) -> None:
    recognizer = SteppedRecognizer(*"12345678")
    recognition = Counted(cast(Any, recognizer), pool)
    told: list[str] = []

    async def listen(name: str, samples: Samples) -> None:
        async for _ in transcribe_recording(recognition, cast(Any, EnergyVad()), samples):
            told.append(name)

    def next_waits(number: int) -> bool:
        return recognition.num_submitted >= number + (told.count("short") < 2)

    async def step_by_step() -> None:
        """Each piece ends when the other file's next one waits, as it does where hearing one takes
        longer than finding the next."""
        for number in range(1, 8):
            await begun(recognizer)
            await until(partial(next_waits, number))
            recognizer.go_on.release()

    async with asyncio.timeout(10):
        files = listen("long", voice(40.0)), listen("short", voice(9.0))
        await asyncio.gather(*files, step_by_step())
    assert sorted(told[:2]) == sorted(told[2:4]) == ["long", "short"], told
    assert told[4:] == ["long"] * 3, told


class Counted(AsrScheduler):
    """Counts what was submitted."""

    num_submitted = 0

    def submit(self, *args: Any, **options: Any) -> Any:
        self.num_submitted += 1
        return super().submit(*args, **options)


# --- a text read aloud ---


async def test_a_text_is_spoken_as_answers_are() -> None:
    voice_of_tones = ToneSynthesizer()
    services = fake_services(ScriptedEngine(), synthesizer=voice_of_tones)
    text = "# Hello\n\n**Good** morning, dear guests. It is `late`."
    pieces = [p async for p in synthesize_text(services, MonotonicClock(), text, speed=1.0)]
    said = " ".join("".join(voice_of_tones.spoken).split())
    assert "*" not in said and "#" not in said and "`" not in said
    assert said.endswith("It is late.")
    assert sum(map(len, pieces)) == sum(1_000 * len(t.strip()) for t in voice_of_tones.spoken)


async def test_nothing_to_say_is_no_fault() -> None:
    services = fake_services(ScriptedEngine())
    (piece,) = [p async for p in synthesize_text(services, MonotonicClock(), " ", speed=1.0)][-1:]
    assert len(piece) == 0


async def test_a_voice_that_fails_is_told() -> None:
    voice_of_tones = ToneSynthesizer()
    voice_of_tones.error = ModelError("hoarse")
    services = fake_services(ScriptedEngine(), synthesizer=voice_of_tones)
    with pytest.raises(SynthesisError, match="hoarse"):
        [p async for p in synthesize_text(services, MonotonicClock(), "Hello.", speed=1.0)]


async def test_callers_are_spoken_to_first(pool: ThreadPoolExecutor) -> None:
    speaking = TtsScheduler(pool)
    gate = threading.Event()
    order: list[str] = []
    running = asyncio.create_task(speaking.run(partial(gate.wait, 10), 0))
    await asyncio.sleep(0)
    jobs = []
    for name, needed_ns, is_live in (
        ("file", 1, False),
        ("later", 9, True),
        ("sooner", 2, True),
        ("other file", 0, False),
    ):
        job = partial(order.append, name)
        jobs.append(asyncio.create_task(speaking.run(job, needed_ns, is_live=is_live)))
    await asyncio.sleep(0)
    assert speaking.num_waiting == 2, "of those who speak with us"
    gate.set()
    await asyncio.gather(running, *jobs)
    assert order == ["sooner", "later", "other file", "file"]
