"""The typed conversation, with an engine that follows a script."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest

from app.cli.chat import AnswerTiming, Chat, ChatOptions, WordWrapper, _params, run_chat
from app.config import Settings
from app.errors import GenerationError
from llm_core import (
    ChatMessage,
    EngineClient,
    EngineConfig,
    FirstToken,
    GenerationDone,
    LlmError,
    ModelLoadError,
    SamplingParams,
    TextDelta,
    Usage,
)

MS = 1_000_000


class Engine:
    """Says its pieces; None: hangs until it is cancelled. Raises an error that is among them."""

    def __init__(self, *pieces: str | None | LlmError) -> None:
        self.pieces = pieces
        self.asked: list[list[ChatMessage]] = []
        self.was_closed = False
        self.hangs = asyncio.Event()

    async def generate(
        self, messages: Sequence[ChatMessage], params: SamplingParams
    ) -> AsyncIterator[FirstToken | TextDelta | GenerationDone]:
        self.asked.append(list(messages))
        try:
            yield FirstToken(
                received_ns=0,
                scheduled_ns=0,
                first_token_ns=100 * MS,
                prompt_tokens=9,
                cached_tokens=4,
            )
            for number, piece in enumerate(self.pieces):
                if piece is None:
                    self.hangs.set()
                    await asyncio.Event().wait()
                elif isinstance(piece, LlmError):
                    raise piece
                else:
                    yield TextDelta(text=piece, num_tokens=number)
            usage = Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=21)
            yield GenerationDone(
                finish_reason="stop", usage=usage, num_steps=1, finished_ns=1100 * MS
            )
        finally:
            self.was_closed = True


def chat_with(engine: Engine, system: str = "Be brief.") -> Chat:
    return Chat(engine, SamplingParams(), system)  # type: ignore[arg-type]  # an engine in all but type


async def ask(chat: Chat, prompt: str) -> tuple[str, AnswerTiming]:
    timing = AnswerTiming(asked_ns=time.monotonic_ns())
    async with aclosing(chat.answer(prompt, timing)) as answer:
        return "".join([text async for text in answer]), timing


def history(chat: Chat) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in chat.messages]


async def test_a_conversation_remembers_until_it_is_reset() -> None:
    engine = Engine("Hel", "lo.")
    chat = chat_with(engine)
    assert (await ask(chat, "Hi"))[0] == "Hello."
    await ask(chat, "Again")
    said = [(message.role, message.content) for message in engine.asked[1]]
    system, user, reply, again = said
    assert system == ("system", "Be brief.")
    assert (user, reply, again) == (("user", "Hi"), ("assistant", "Hello."), ("user", "Again"))
    chat.reset()
    await ask(chat, "New")
    assert [message.content for message in engine.asked[2]] == ["Be brief.", "New"]


async def test_no_instructions_at_all() -> None:
    engine = Engine("Hello.")
    await ask(chat_with(engine, system=""), "Hi")
    assert [message.role for message in engine.asked[0]] == ["user"]


async def test_a_stopped_answer_is_aborted_and_kept_as_far_as_it_was_seen() -> None:
    engine = Engine("Once ", None, "upon")
    chat = chat_with(engine)
    asking = asyncio.create_task(ask(chat, "A story"))
    await engine.hangs.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert engine.was_closed
    assert history(chat) == [("user", "A story"), ("assistant", "Once ")]


async def test_a_question_without_an_answer_is_not_kept() -> None:
    chat = chat_with(Engine(LlmError("no")))
    with pytest.raises(LlmError):
        await ask(chat, "Hi")
    assert chat.messages == []


def test_the_engine_is_the_one_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARLEY_LLM_KV_DTYPE", "int8")
    monkeypatch.setenv("PARLEY_LLM_MAX_STEP_MS", "70")
    model = tmp_path / "model.gguf"
    model.touch()
    started: list[EngineConfig] = []

    async def start(config: EngineConfig) -> EngineClient:
        started.append(config)
        raise ModelLoadError("not this time")

    monkeypatch.setattr(EngineClient, "start", staticmethod(start))
    for threads in (3, None):
        with pytest.raises(GenerationError, match="not this time"):
            run_chat(ChatOptions("", model=str(model), home=tmp_path, threads=threads))
    for config in started:
        assert (config.model_path, config.kv_dtype, config.max_step_ms) == (str(model), "int8", 70)
        assert (config.max_sequences, config.standby) == (1, False), "one person, who can wait"
    assert [config.num_threads for config in started] == [3, Settings().llm_threads]


def test_answers_are_sampled_as_the_settings_have_it() -> None:
    settings = Settings(temperature=0.4, top_p=0.8, repetition_penalty=1.2, max_reply_tokens=50)
    params = _params(ChatOptions("", seed=5), settings)
    assert (params.temperature, params.top_p, params.repetition_penalty) == (0.4, 0.8, 1.2)
    assert (params.max_tokens, params.seed) == (50, 5)
    assert _params(ChatOptions("", temperature=0.0, max_tokens=7), settings) == SamplingParams(
        max_tokens=7, temperature=0.0, top_p=0.8, repetition_penalty=1.2
    )


async def test_what_an_answer_took() -> None:
    _, timing = await ask(chat_with(Engine("Hello.")), "Hi")
    timing.asked_ns, timing.first_text_ns = 20 * MS, 140 * MS
    # 20 tokens after the first one, in one second.
    assert timing.line() == "first word 120 ms · 20.0 tok/s · 21 tokens · prompt 9, 4 cached"
    assert AnswerTiming(asked_ns=0).line() == "no answer"


async def test_an_answer_that_was_cut_is_marked() -> None:
    _, timing = await ask(chat_with(Engine("Hello.")), "Hi")
    assert timing.cut_mark == ""
    timing.finish_reason = "length"
    assert timing.cut_mark == "… (cut at 21 tokens)"
    assert AnswerTiming(asked_ns=0).cut_mark == ""


@pytest.mark.parametrize("cut", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three", ["one two ", "three"]),
        ("12345678 90", ["12345678 ", "90"]),
        ("1234567890 1", ["1234567890", "1"]),
        ("123456789012 34", ["123456789012", "34"]),
        ("a\nb\n\nc", ["a", "b", "", "c"]),
        ("a  b", ["a  b"]),
        ("", [""]),
    ],
)
def test_lines_break_between_words(text: str, lines: list[str], cut: int) -> None:
    wrapper = WordWrapper(10)
    shown = "".join(wrapper.feed(text[at : at + cut]) for at in range(0, len(text), cut))
    assert (shown + wrapper.flush()).split("\n") == lines


def test_a_word_is_shown_when_it_is_whole() -> None:
    wrapper = WordWrapper(10)
    assert [wrapper.feed(text) for text in ("Hel", "lo ", "you")] == ["", "Hello ", ""]
    assert wrapper.flush() == "you"
