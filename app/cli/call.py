"""``parley call``: a recording phones the server, as a provider would put it through."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from app.cli.talk import Speaker, Talk, TalkOptions, check_places, run_until_stopped
from app.clients import INVALID_KEY, AudioSocketPort, CallClient, Trouble, is_valid_key, open_call
from app.errors import ConfigError


@dataclass(frozen=True)
class CallOptions:
    """What the command line asked for beside ``TalkOptions``; see its help."""

    provider: str
    keys: str = ""
    loss: float = 0.0
    late_ms: float = 0.0
    is_shuffled: bool = False
    audiosocket_port: int | None = None


def run_call(options: TalkOptions, call: CallOptions) -> bool:
    """Makes the call; True when it was answered. Raises ParleyError when none came about."""
    if options.api_key is not None and not is_valid_key(options.api_key):
        raise ConfigError(f"--api-key or PARLEY_API_KEY: {INVALID_KEY}")
    port = None
    if call.provider == "audiosocket":
        port = AudioSocketPort.of(options.url, call.audiosocket_port)
    check_places(options)
    return run_until_stopped(_run(options, call, port))


async def _run(options: TalkOptions, call: CallOptions, port: AudioSocketPort | None) -> bool:
    async with AsyncExitStack() as stack:
        return await _PhoneTalk(options, call, port, stack).run()


class _PhoneTalk(Talk):
    """As ``parley talk``, over a phone."""

    def __init__(
        self,
        options: TalkOptions,
        call: CallOptions,
        port: AudioSocketPort | None,
        stack: AsyncExitStack,
    ) -> None:
        super().__init__(options, stack)
        self._call_options = call
        self._port = port

    def _own_settings(self) -> dict[str, str]:
        return {} if self._port is None else self._port.settings

    def _open(self, url: str, api_key: str | None) -> AbstractAsyncContextManager[Speaker]:
        return self._phone(url, api_key)

    @asynccontextmanager
    async def _phone(self, url: str, api_key: str | None) -> AsyncIterator[CallClient]:
        call = self._call_options
        trouble = Trouble(call.loss, call.late_ms, call.is_shuffled)
        calling = open_call(
            url,
            call.provider,
            api_key=api_key,
            audiosocket=None if self._port is None else self._port.at(url),
            trouble=trouble,
        )
        async with calling as client:
            await client.hear_greeting()
            await client.press(call.keys)
            yield client
