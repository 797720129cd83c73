"""Tools of the server's own: Python functions that the model may call.

An operator writes a module and names it in ``PARLEY_TOOLS``::

    from app.conversation.tools import ToolError, tool

    @tool(timeout_s=3.0)
    async def weather(city: str, days: int = 1) -> str:
        '''The weather forecast for a city.'''
        ...

Name, description and parameters come from the function's name, docstring and type hints. What the
function returns goes to the model as text (other values than strings as JSON); the message of a
``ToolError`` does, too. Any other exception is for the log: the model hears only that it failed. A
parameter of the type ``ToolContext`` is not the model's: it says for whom the function is called.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, overload

import msgspec
import pydantic_core
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from app.conversation.session_config import SessionConfig, Tool, ToolChoice
from app.errors import ConfigError
from llm_core import ToolSpec

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 10.0
MAX_OUTPUT_CHARS = 8_000
# Functions that block run in threads of their own; one that never returns costs one of these.
MAX_THREADS = 8


class ToolError(Exception):
    """Raised by a tool: its message is for the model."""


@dataclass(slots=True)
class ToolContext:
    """Whose tools are called. ``notes`` are the tools' own: empty at first, of this conversation
    alone, and gone with it.

    ``session_id`` is that of the session; ``call_id`` (the provider's) and ``parameters`` are those
    of a phone call: what the provider was given along, with Twilio also ``from`` and ``to``.
    """

    session_id: str = ""
    call_id: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


class _Arguments(BaseModel):
    """Base of the models made of signatures: JSON that does not fit is an error."""

    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A registered function; it can still be called as one."""

    tool: Tool
    function: Callable[..., Any]
    arguments: type[_Arguments]
    timeout_s: float
    asks_for: str | None = None  # the parameter that is the conversation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@overload
def tool(function: Callable[..., Any], /) -> ServerTool: ...
@overload
def tool(
    *, name: str | None = None, description: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Callable[[Callable[..., Any]], ServerTool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> ServerTool | Callable[[Callable[..., Any]], ServerTool]:
    """Make a tool of a function, async or not. Raises ConfigError for a signature without types."""

    def register(wrapped: Callable[..., Any]) -> ServerTool:
        shown_name = name or wrapped.__name__
        arguments = _arguments_of(wrapped, shown_name)
        schema = arguments.model_json_schema()
        schema.pop("title", None)
        for property_schema in schema.get("properties", {}).values():
            property_schema.pop("title", None)
        about = inspect.cleandoc(description or wrapped.__doc__ or "")
        asks_for = next((n for n, kind in _parameters(wrapped) if kind is ToolContext), None)
        shown = Tool(shown_name, about, schema)
        return ServerTool(shown, wrapped, arguments, timeout_s, asks_for)

    return register if function is None else register(function)


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Names and types."""
    signature = inspect.signature(function, eval_str=True)
    return [(name, parameter.annotation) for name, parameter in signature.parameters.items()]


def _arguments_of(function: Callable[..., Any], name: str) -> type[_Arguments]:
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"tool {name!r}: *{parameter.name} cannot be described to a model")
        if parameter.annotation is ToolContext:
            continue
        if parameter.annotation is parameter.empty:
            raise ConfigError(f"tool {name!r}: parameter {parameter.name!r} has no type")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (parameter.annotation, default)
    return create_model(name, __base__=_Arguments, **fields)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a call: one of both."""

    output: str | None = None
    error: str | None = None

    @property
    def for_model(self) -> str:
        """The text that the model reads."""
        return f"Error: {self.error}" if self.error is not None else self.output or ""


class ToolBox:
    """The server's own tools."""

    def __init__(
        self,
        tools: Iterable[ServerTool] = (),
        threads: asyncio.Semaphore | None = None,
        conversation: ToolContext | None = None,
    ) -> None:
        """``threads``: those of another box, to be shared with it. ``conversation``: whose tools
        they are; None: nobody's yet."""
        self.conversation = conversation
        self._tools: dict[str, ServerTool] = {}
        for entry in tools:
            if entry.tool.name in self._tools:
                raise ConfigError(f"there are two tools named {entry.tool.name!r}")
            self._tools[entry.tool.name] = entry
        self._threads = threads or asyncio.Semaphore(MAX_THREADS)

    @classmethod
    def load(cls, place: str) -> ToolBox:
        """The tools of ``package.module``, or only ``package.module:name,name``.

        The module may lie in the current directory. Raises ConfigError when there are none.
        """
        module_name, _, names = place.partition(":")
        # An installed command does not look where it was started. Last, so that nothing which
        # lies there takes the place of what is installed.
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.append(here)
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # whatever somebody else's module raises
            raise ConfigError(f"PARLEY_TOOLS: cannot import {module_name!r}: {error}") from error
        found = _tools_in(module)
        wanted = [name.strip() for name in names.split(",") if name.strip()] or list(found)
        if missing := [name for name in wanted if name not in found]:
            raise ConfigError(f"PARLEY_TOOLS: {module_name!r} has no tool {missing[0]!r}")
        if not wanted:
            raise ConfigError(f"PARLEY_TOOLS: {module_name!r} has no function marked with @tool")
        return cls(found[name] for name in wanted)

    def plus(self, *tools: ServerTool) -> ToolBox:
        """These tools and ``tools``, with the same threads. Raises ConfigError when a name is there
        twice."""
        return ToolBox((*self._tools.values(), *tools), self._threads, self.conversation)

    def of(self, conversation: ToolContext) -> ToolBox:
        """These tools, for ``conversation``."""
        return ToolBox(self._tools.values(), self._threads, conversation)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all tools."""
        return tuple(self._tools)

    def offered(self, config: SessionConfig) -> tuple[Tool, ...]:
        """What the model may call in a session: the client's tools, and ours.

        A client's tool hides one of ours that has the same name.
        """
        if config.tool_choice.kind == "none":
            return ()
        theirs = {entry.name for entry in config.tools}
        chosen = self.names if config.server_tools is None else config.server_tools
        ours = [self._tools[n].tool for n in chosen if n in self._tools and n not in theirs]
        return (*config.tools, *ours)

    def specs(self, config: SessionConfig) -> tuple[ToolSpec, ...]:
        """``offered``, as the model is told of it."""
        return tuple(
            ToolSpec(
                name=entry.name,
                description=entry.description,
                parameters=msgspec.json.encode(entry.parameters).decode(),
            )
            for entry in self.offered(config)
        )

    def runs_here(self, name: str, config: SessionConfig) -> bool:
        """Whether a call of ``name`` is ours to run."""
        theirs = {entry.name for entry in config.tools}
        chosen = config.server_tools
        return name in self._tools and name not in theirs and (chosen is None or name in chosen)

    async def run(self, name: str, arguments: str) -> Outcome:
        """Call a tool with the model's arguments (JSON text). Raises nothing but CancelledError.

        A blocking function cannot be stopped: cancelled or too late, its result is thrown away.
        """
        entry = self._tools[name]
        try:
            checked = entry.arguments.model_validate_json(arguments or "{}")
        except ValidationError as error:
            return Outcome(error=_argument_error(error))
        values = {name: getattr(checked, name) for name in type(checked).model_fields}
        if entry.asks_for is not None:
            values[entry.asks_for] = self.conversation or ToolContext()
        try:
            async with asyncio.timeout(entry.timeout_s):
                result = await self._call(entry, values)
            return Outcome(output=_as_text(result))
        except ToolError as error:
            return Outcome(error=str(error)[:MAX_OUTPUT_CHARS])
        except TimeoutError:
            log.warning("tool took too long", extra={"tool": name, "timeout_s": entry.timeout_s})
            return Outcome(error=f"no answer within {entry.timeout_s:g} seconds")
        # `sys.exit` in somebody's helper ends what it was called for, and not the server.
        except (Exception, SystemExit) as error:
            log.error("tool failed", extra={"tool": name}, exc_info=error)
            return Outcome(error="the tool failed")

    async def _call(self, entry: ServerTool, values: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(entry.function):
            return await entry.function(**values)
        await self._threads.acquire()
        return await _in_thread(lambda: entry.function(**values), self._threads.release)


def _tools_in(module: ModuleType) -> dict[str, ServerTool]:
    found = (value for value in vars(module).values() if isinstance(value, ServerTool))
    return {entry.tool.name: entry for entry in found}


def _argument_error(error: ValidationError) -> str:
    """Short, and in words that let the model do better."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(step) for step in first["loc"])
    return f"bad arguments: {where}: {first['msg']}" if where else f"bad arguments: {first['msg']}"


def _as_text(result: Any) -> str:
    text = result if isinstance(result, str) else pydantic_core.to_json(result).decode()
    if len(text) > MAX_OUTPUT_CHARS:
        return text[:MAX_OUTPUT_CHARS] + " [cut]"
    return text


async def _in_thread(work: Callable[[], Any], on_end: Callable[[], None]) -> Any:
    """Run ``work`` in a daemon thread: one that never ends must not keep the server from ending.

    ``on_end`` is called on the loop when the thread has ended, however long after.
    """
    loop = asyncio.get_running_loop()
    # Errors as values: a future takes no StopIteration.
    future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def finish(result: Any, error: BaseException | None) -> None:
        on_end()
        if not future.done():  # else cancelled, or timed out
            future.set_result((result, error))

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        try:
            loop.call_soon_threadsafe(finish, result, error)
        except RuntimeError:
            log.info("a tool ended after the server")

    threading.Thread(target=run, daemon=True, name="tool").start()
    result, error = await future
    if error is not None:
        raise error
    return result


def choice_after_results(choice: ToolChoice) -> ToolChoice:
    """A demand to call a tool is met by the first round of calls; then the model may speak."""
    return ToolChoice() if choice.kind in ("required", "function") else choice


def __getattr__(name: str) -> Any:
    """The former name of ``ToolContext`` works for one more release."""
    if name == "Conversation":
        warnings.warn(
            "app.conversation.tools.Conversation is now called ToolContext; "
            "the old name goes in the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return ToolContext
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
