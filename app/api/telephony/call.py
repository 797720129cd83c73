"""A conversation by phone: a Realtime call whose caller has a line and a keypad, and no client.

Clients attach to it by its id (``/v1/realtime?call_id=``), as to a WebRTC call: they see what
happens, may change the session, and run its functions. Nobody has to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace
from functools import lru_cache, partial

from app.api.model_names import OWN_NAME
from app.api.realtime.call import CallConnection
from app.api.realtime.connection import MakeSession
from app.conversation import (
    DtmfReceived,
    Item,
    Part,
    Services,
    Session,
    SessionEvent,
    SpeechStarted,
    Tasks,
    ToolContext,
    TranscriptionCompleted,
    new_id,
    tool,
)
from app.errors import ClientError
from app.transports.telephony import PhoneLine
from audio.codecs import AudioFormat, encode
from audio.errors import AudioError
from audio.resample import StreamResampler

logger = logging.getLogger(__name__)

# So long after a key the caller may press another one; `#` says that it was the last.
KEYS_PAUSE_S = 1.5
MAX_KEYS = 32
# The line must have been silent for so long before the assistant hangs up.
_QUIET_S = 0.3
_LOOK_S = 0.05


class Greeting:
    """What a caller hears first. Made once for each audio format that phones ask for."""

    def __init__(self, services: Services) -> None:
        self.text = services.settings.phone_greeting.strip()
        self._services = services
        self._made = lru_cache(maxsize=8)(self._make)

    async def audio(self, fmt: AudioFormat) -> bytes:
        """Empty when there is none. Raises AudioError."""
        if not self.text:
            return b""
        job = partial(self._made, fmt)
        return await asyncio.get_running_loop().run_in_executor(self._services.workers, job)

    def _make(self, fmt: AudioFormat) -> bytes:
        synthesizer = self._services.synthesizer
        resampler = StreamResampler(synthesizer.sample_rate, fmt.rate)
        samples = synthesizer.synthesize(self.text)
        return encode(resampler.process(samples), fmt) + encode(resampler.flush(), fmt)


class PhoneCall(CallConnection):
    """From the start of the stream to the end of the call."""

    def __init__(
        self,
        line: PhoneLine,
        services: Services,
        greeting: Greeting,
        *,
        conversation: ToolContext,
        make_session: MakeSession = Session,
    ) -> None:
        services = replace(services, tools=services.tools.of(conversation))
        if services.settings.phone_hang_up_tool:
            about = "End the phone call. Only when the caller has said goodbye."
            hang_up = tool(name="hang_up", description=about)(self._hang_up_later)
            services = replace(services, tools=services.tools.plus(hang_up))
        super().__init__(line, line.audio, services, OWN_NAME, make_session=make_session)
        self._line = line
        self._greeting = greeting
        self._greeting_item: Item | None = None
        self._has_spoken = False
        self._keys = ""
        self._pressed: asyncio.Queue[str] = asyncio.Queue(maxsize=MAX_KEYS)
        self._leaving = asyncio.Event()
        line.on_key = self._on_key

    async def _watch_and_serve(self, session: Session) -> None:
        beside = Tasks(session.id)  # one that fails says so at once, and the call goes on
        beside.start(self._greet(session))
        beside.start(self._take_keys(session))
        beside.start(self._leave(session))
        try:
            await super()._watch_and_serve(session)
        finally:
            await beside.close()

    # --- the first words ---

    async def _greet(self, session: Session) -> None:
        try:
            audio = await self._greeting.audio(self._line.audio.output_format)
        except AudioError as error:
            logger.error("no greeting: %s", error)
            return
        if not audio or self._has_spoken:
            return
        response_id = new_id("resp")
        item = Item(new_id("item"), "assistant", [Part("output_text", self._greeting.text)])
        async with self._turnstile:
            await session.add_item(item)
        self._greeting_item = item
        await self._line.audio.play(response_id, item.id, audio)
        self._line.audio.finish(response_id)

    async def _sink(self, event: SessionEvent) -> None:
        match event:
            case SpeechStarted():
                self._has_spoken = True
                if self._greeting_item is not None:
                    self._greeting_item = None
                    self._line.audio.clear()
            case TranscriptionCompleted(transcript=text) if text.strip():
                self._leaving.clear()  # there is more to say after all
        await super()._sink(event)

    # --- keys ---

    def _on_key(self, key: str) -> None:
        # Overflow rule: who presses keys faster than they are taken loses the newest.
        with contextlib.suppress(asyncio.QueueFull):
            self._pressed.put_nowait(key)

    async def _take_keys(self, session: Session) -> None:
        """A key stops the answer at once; a row of keys is what the caller said."""
        while True:
            try:
                async with asyncio.timeout(KEYS_PAUSE_S if self._keys else None):
                    key = await self._pressed.get()
            except TimeoutError:
                await self._say_keys(session)
                continue
            async with self._turnstile:
                self._greeting_item = None
                await self._sink(DtmfReceived(key, int(time.time())))
                await self.clear()
            self._keys += key
            if key == "#" or len(self._keys) >= MAX_KEYS:
                await self._say_keys(session)

    async def _say_keys(self, session: Session) -> None:
        keys, self._keys = self._keys, ""
        words = f"[The caller pressed these keys of the phone: {' '.join(keys)}]"
        item = Item(new_id("item"), "user", [Part("input_text", words)])
        async with self._turnstile:
            try:
                await session.add_item(item)
            except ClientError as error:  # an attached client has filled the conversation
                logger.warning("keys of the phone are lost: %s", error)
                return
            with contextlib.suppress(ClientError):  # an answer is on its way, and will know
                await session.create_response()

    # --- the end ---

    async def _hang_up_later(self) -> str:
        self._leaving.set()
        return "The call ends when you have said goodbye. Say it in a few words."

    async def _leave(self, session: Session) -> None:
        """Hang up after the last word, as it was heard; not if the caller goes on."""
        quiet_s = 0.0
        while True:
            await self._leaving.wait()
            is_over = session.is_idle and self._line.audio.is_silent
            quiet_s = quiet_s + _LOOK_S if is_over else 0.0
            if quiet_s >= _QUIET_S and self._leaving.is_set():
                await self._line.close(1000, "the assistant has hung up")
                return
            # Whether all was heard is asked, not told: there are many ways in which it ends.
            await asyncio.sleep(_LOOK_S)
