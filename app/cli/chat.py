"""``parley chat``: the language model, typed to, without audio and without a server."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from app.cli.models import fetch_models
from app.config import Settings, load_settings
from app.engine_options import engine_config
from app.errors import GenerationError
from app.models import ModelStore
from llm_core import (
    ChatMessage,
    EngineClient,
    FinishReason,
    FirstToken,
    GenerationDone,
    LlmError,
    PromptTooLongError,
    SamplingParams,
    TextDelta,
    Usage,
)

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."
# Readline must know which characters of a prompt take no room.
PROMPT = "\001\033[1;36m\002you \001\033[0m\002"


@dataclass(frozen=True)
class ChatOptions:
    """What the command line asked for; None: as set. ``prompt`` None: a conversation.

    ``system`` "": no instructions.
    """

    system: str
    prompt: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    model: str | None = None
    threads: int | None = None
    home: Path | None = None


@dataclass
class AnswerTiming:
    """What one answer took. ``ttft_ms``: from asking to the first text on the screen."""

    asked_ns: int
    first_text_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0
    usage: Usage | None = None
    finish_reason: FinishReason | None = None

    @property
    def cut_mark(self) -> str:
        """What to show after an answer that reached its limit; "" after one that is whole."""
        if self.usage is None or self.finish_reason != "length":
            return ""
        return f"… (cut at {self.usage.completion_tokens:,} tokens)"

    def line(self) -> str:
        """For people."""
        if self.usage is None or not self.first_text_ns:
            return "no answer"
        parts = [f"first word {(self.first_text_ns - self.asked_ns) / 1e6:,.0f} ms"]
        seconds = (self.finished_ns - self.first_token_ns) / 1e9
        if self.usage.completion_tokens > 1 and seconds > 0:
            # The first token belongs to the wait, so it is not among those that are timed.
            parts.append(f"{(self.usage.completion_tokens - 1) / seconds:,.1f} tok/s")
        parts.append(f"{self.usage.completion_tokens} tokens")
        parts.append(f"prompt {self.usage.prompt_tokens}, {self.usage.cached_tokens} cached")
        return " · ".join(parts)


@dataclass
class Chat:
    """A conversation with the engine."""

    engine: EngineClient
    params: SamplingParams
    system: str
    messages: list[ChatMessage] = field(default_factory=list)

    def reset(self) -> None:
        """Forgets everything but the instructions."""
        self.messages.clear()

    async def answer(self, prompt: str, timing: AnswerTiming) -> AsyncIterator[str]:
        """The answer, piece by piece. What was given out stays in the conversation, even when the
        answer is stopped; a question that got no answer does not. Raises LlmError.
        """
        asked = ChatMessage(role="user", content=prompt)
        first = [ChatMessage(role="system", content=self.system)] if self.system else []
        said = ""
        events = self.engine.generate([*first, *self.messages, asked], self.params)
        try:
            async for event in events:
                match event:
                    case FirstToken():
                        timing.first_token_ns = event.first_token_ns
                    case TextDelta():
                        timing.first_text_ns = timing.first_text_ns or time.monotonic_ns()
                        said += event.text
                        yield event.text
                    case GenerationDone():
                        timing.finished_ns = event.finished_ns
                        timing.usage = event.usage
                        timing.finish_reason = event.finish_reason
        finally:
            if said:
                self.messages += [asked, ChatMessage(role="assistant", content=said)]


def run_chat(options: ChatOptions) -> None:
    """Runs the command. Raises ParleyError when it fails."""
    settings = load_settings(home=options.home, llm_model=options.model)
    notes = Console(stderr=True, highlight=False)
    store = ModelStore(settings.home)
    fetch_models(store, [settings.llm_model], notes)
    alone = {"max_sequences": "1", "standby": "false"}
    if options.threads is not None:
        alone["num_threads"] = str(options.threads)
    config = engine_config(settings, store.resolve(settings.llm_model), alone)
    with asyncio.Runner() as runner:
        try:
            with notes.status("Loading the model"):
                engine = runner.run(EngineClient.start(config))
        except LlmError as error:
            raise GenerationError(str(error), code=error.code) from error
        try:
            chat = Chat(engine, _params(options, settings), options.system)
            if options.prompt is not None:
                runner.run(_answer_once(chat, options.prompt, notes))
            else:
                _converse(chat, runner, notes)
        finally:
            runner.run(engine.close())


def _params(options: ChatOptions, settings: Settings) -> SamplingParams:
    return SamplingParams(
        max_tokens=options.max_tokens or settings.max_reply_tokens,
        temperature=settings.temperature if options.temperature is None else options.temperature,
        top_p=settings.top_p,
        repetition_penalty=settings.repetition_penalty,
        seed=options.seed,
    )


async def _answer_once(chat: Chat, prompt: str, notes: Console) -> None:
    """For scripts: the answer alone goes to standard output."""
    timing = AnswerTiming(asked_ns=time.monotonic_ns())
    try:
        async for text in chat.answer(prompt, timing):
            sys.stdout.write(text)
            sys.stdout.flush()
    except LlmError as error:
        raise GenerationError(str(error), code=error.code) from error
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
    if timing.cut_mark:
        notes.print(Text(timing.cut_mark, style="dim"))
    notes.print(Text(timing.line(), style="dim"))


def _converse(chat: Chat, runner: asyncio.Runner, notes: Console) -> None:
    """For people. Lines are read outside the event loop, so that Ctrl-C is simply Ctrl-C here."""
    with suppress(ImportError):
        import readline  # noqa: F401  gives input() editing and history, where the system has it

    info = chat.engine.info
    notes.print(Text.assemble((info.name, "bold"), (f"  {HELP}", "dim")))
    while True:
        try:
            line = input(PROMPT).strip()
            line.encode()  # finds bytes that Python could not decode and smuggled in
        except EOFError:
            notes.print()
            return
        except KeyboardInterrupt:
            notes.print(Text(f"\n{HELP}", style="dim"))
            continue
        except UnicodeError:
            notes.print(Text("This is not text in UTF-8.", style="red"))
            continue
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            chat.reset()
            notes.print(Text("The conversation is forgotten.", style="dim"))
        elif line.startswith("/"):
            notes.print(Text(HELP, style="dim"))
        elif line:
            _show_answer(chat, line, runner, notes)


def _show_answer(chat: Chat, prompt: str, runner: asyncio.Runner, notes: Console) -> None:
    timing = AnswerTiming(asked_ns=time.monotonic_ns())
    try:
        # The runner turns Ctrl-C into a cancellation, which stops the engine too.
        runner.run(_print_answer(chat, prompt, timing))
        notes.print(Text(timing.line(), style="dim"))
    except KeyboardInterrupt:
        notes.print(Text("\nstopped", style="dim"))
    except PromptTooLongError as error:
        notes.print(Text(f"{error} (/reset begins anew)", style="red"))
    except LlmError as error:
        notes.print(Text(str(error), style="red"))


async def _print_answer(chat: Chat, prompt: str, timing: AnswerTiming) -> None:
    console = Console(highlight=False)
    wrapper = WordWrapper(console.width)
    async for text in chat.answer(prompt, timing):
        console.print(Text(wrapper.feed(text)), end="", soft_wrap=True)
    mark = Text(timing.cut_mark, style="dim")
    console.print(Text.assemble(wrapper.flush(), mark), soft_wrap=True)


class WordWrapper:
    """Breaks lines between words while the text is still coming; a word is shown when it is whole.

    Widths are characters; wide ones (CJK) may make a line break in the terminal's own way.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._word = ""

    def feed(self, text: str) -> str:
        """What can be shown now."""
        shown = ""
        for char in text:
            if char == "\n":
                shown += self.flush() + char
                self._column = 0
            elif char == " ":
                shown += self.flush()
                if self._column < self._width:
                    shown += char
                    self._column += 1
            else:
                self._word += char
        return shown

    def flush(self) -> str:
        """The word that has not been shown yet."""
        word, self._word = self._word, ""
        if not word:
            return ""
        breaks = self._column > 0 and self._column + len(word) > self._width
        self._column = len(word) if breaks else self._column + len(word)
        return f"\n{word}" if breaks else word
