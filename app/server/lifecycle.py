"""Start and end of a server: models loaded side by side, a socket opened, all closed again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import uvicorn
import uvloop
from fastapi import FastAPI

from app.access import Connections
from app.api.telephony.routes import audiosocket
from app.config import Settings, unknown_variables
from app.conversation import (
    AsrScheduler,
    EagerAdmission,
    Filler,
    Services,
    ToolBox,
    TtsScheduler,
    warm_up,
)
from app.errors import ConfigError, ModelStoreError
from app.logging_setup import setup_logging
from app.models import ModelStore
from app.observe import (
    FILE_NAME,
    AudioFiles,
    LoopLag,
    Metrics,
    Retention,
    TraceStore,
    TraceWriter,
    TurnSink,
    otlp_spans,
)
from app.server.engine_startup import load_engine, load_rollout, load_small_engine
from app.server.http_protocol import FewFragmentsProtocol, server_protocol
from app.server.routes import WEB_ROOT, create_app
from audio.asr import Recognizer
from audio.endpointing import SmartTurnModel
from audio.errors import AudioError
from audio.tts import Synthesizer
from audio.vad import VadModel
from llm_core import LlmError

__all__ = ["WEB_ROOT", "build_services", "create_app", "listening", "serve"]

logger = logging.getLogger(__name__)

# A peer that vanished, or never reads, holds its socket no longer than this (TCP_USER_TIMEOUT).
_DEAD_PEER_MS = 30_000
_GRACE_S = 5
# For how long another thread may run Python code while the event loop waits for its turn.
_SWITCH_INTERVAL_S = 0.001


class _SpeechModel(Protocol):
    def warm_up(self) -> None: ...


Model = TypeVar("Model", bound=_SpeechModel)


@asynccontextmanager
async def build_services(
    settings: Settings,
) -> AsyncIterator[Services]:
    """Load and warm up the models, side by side; close them at the end of the block.

    Models that are not installed are fetched.
    Raises ModelStoreError when a model cannot be had or loaded, ConfigError for wrong tools.
    """
    started_s = time.monotonic()
    tools = ToolBox.load(settings.tools) if settings.tools else ToolBox()
    async with AsyncExitStack() as stack:
        # One thread more than what they are for: short jobs (prosody) need not wait.
        num_threads = settings.speech_workers + 1
        workers = ThreadPoolExecutor(num_threads, thread_name_prefix="speech")
        # In a thread: a transcription that is under way cannot be stopped, and must not stop us.
        stack.push_async_callback(asyncio.to_thread, workers.shutdown, cancel_futures=True)
        try:
            async with asyncio.TaskGroup() as loading:
                paths = _Paths(settings, workers)
                engine = loading.create_task(load_engine(settings, tools, paths.of, stack))
                make_recognizer = partial(
                    Recognizer,
                    num_threads=settings.asr_threads,
                    language=settings.asr_language or None,
                )
                recognizer = loading.create_task(
                    _loaded(settings.asr_model, make_recognizer, paths, workers)
                )
                make_voice = partial(Synthesizer, num_threads=settings.tts_threads)
                synthesizer = loading.create_task(
                    _loaded(settings.tts_model, make_voice, paths, workers)
                )
                vad = asyncio.get_running_loop().run_in_executor(workers, VadModel)
                turn_model = loading.create_task(_load_turn_model(settings, paths, workers))
                await vad
        except ExceptionGroup as errors:
            raise _loading_error(errors) from errors
        try:
            rollout = await load_rollout(settings, engine.result(), tools, paths.of, stack)
            small_engine = await load_small_engine(settings, tools, paths.of, stack)
        except LlmError as error:
            raise ModelStoreError(f"cannot load the second engine: {error}") from error
        metrics = Metrics()
        sinks: list[TurnSink] = [metrics.observe, *([rollout.observe] if rollout else [])]
        traces = _open_traces(settings, sinks, stack)
        loop_lag = LoopLag()
        measuring = asyncio.create_task(loop_lag.run(), name="loop lag")
        stack.callback(measuring.cancel)
        recognition = AsrScheduler(recognizer.result(), workers)
        services = Services(
            engine=engine.result(),
            recognition=recognition,
            load=EagerAdmission(recognition, settings.eager_max_generating),
            # One is the recogniser's.
            speaking=TtsScheduler(workers, max(1, settings.speech_workers - 1)),
            synthesizer=synthesizer.result(),
            vad=vad.result(),
            workers=workers,
            traces=traces,
            metrics=metrics,
            loop_lag=loop_lag,
            settings=settings,
            filler=await _make_filler(settings, synthesizer.result(), workers),
            tools=tools,
            rollout=rollout,
            small_engine=small_engine,
            turn_model=turn_model.result(),
        )
        await warm_up(services)
        logger.info("ready", extra={"took_s": round(time.monotonic() - started_s, 1)})
        yield services


class _Paths:
    """Models by name, fetched if need be, in ``workers``."""

    def __init__(self, settings: Settings, workers: ThreadPoolExecutor) -> None:
        self._store = ModelStore(settings.home)
        self._workers = workers

    async def of(self, name: str) -> Path:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, self._store.fetch, name)


def _open_traces(settings: Settings, sinks: list[TurnSink], stack: AsyncExitStack) -> TraceWriter:
    if settings.otel_endpoint:
        spans = otlp_spans(settings)
        stack.push_async_callback(asyncio.to_thread, spans.close)
        sinks.append(spans)
    if settings.trace_db:
        retention = Retention(
            max_age_s=settings.trace_max_days * 86_400,
            max_bytes=int(settings.trace_max_mb * 1024 * 1024),
        )
        store = TraceStore(settings.home / FILE_NAME, retention)
    else:
        store = TraceStore.in_memory(settings.trace_ring)
    stack.callback(store.close)
    recordings = None
    if settings.record:
        recordings = AudioFiles(
            settings.home / "recordings",
            max_age_s=settings.trace_max_days * 86_400,
            max_bytes=int(settings.record_max_mb * 1024 * 1024),
        )
    traces = TraceWriter(
        store,
        store_transcripts=settings.store_transcripts,
        recordings=recordings,
        sinks=sinks,
    )
    traces.start()
    stack.push_async_callback(asyncio.to_thread, traces.close)
    return traces


async def _loaded(
    name: str, make: Callable[[Path], Model], paths: _Paths, workers: ThreadPoolExecutor
) -> Model:
    """The speech model ``name``, ready for its first caller."""
    path = await paths.of(name)

    def load() -> Model:
        model = make(path)
        model.warm_up()
        return model

    return await asyncio.get_running_loop().run_in_executor(workers, load)


async def _load_turn_model(
    settings: Settings, paths: _Paths, workers: ThreadPoolExecutor
) -> SmartTurnModel | None:
    if not settings.turn_model:
        return None
    return await _loaded(settings.turn_model, SmartTurnModel, paths, workers)


async def _make_filler(
    settings: Settings, synthesizer: Synthesizer, workers: ThreadPoolExecutor
) -> Filler | None:
    if "filler" not in settings.budget_policies or not settings.budget_filler:
        return None
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(workers, Filler, settings.budget_filler, synthesizer)


def _loading_error(errors: ExceptionGroup) -> Exception:
    """The first failure; the rest were cancelled because of it. Faults of ours stay as they are."""
    error = errors.exceptions[0]
    if isinstance(error, AudioError | LlmError):
        return ModelStoreError(f"cannot load a model: {error}")
    return error


@asynccontextmanager
async def listening(
    app: FastAPI, settings: Settings, listener: socket.socket | None = None
) -> AsyncIterator[str]:
    """Serve ``app`` during the block; gives the URL. The end is graceful: sessions get 1001.

    ``listener``: a bound socket, closed at the end; without it the settings' address is bound.
    Raises ConfigError when the address cannot be had.
    """
    _check_tls(settings)
    listener = listener or bind(settings)
    config = uvicorn.Config(
        app,
        lifespan="on",
        http=cast(Any, server_protocol),
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        ws=FewFragmentsProtocol,
        ws_max_size=settings.max_message_bytes,
        # Speech in base64 hardly shrinks, and deflating it costs more than the bytes it saves.
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=_GRACE_S,
        log_config=None,
        access_log=False,
        server_header=False,
    )
    server = _Server(config, app.state.connections, settings.drain_timeout_s)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http server")
    ready = asyncio.create_task(server.ready.wait(), name="http server start")
    try:
        await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()  # raises what went wrong
            raise ConfigError("the server ended before it was ready")
        scheme = "https" if settings.tls_cert else "http"
        yield _url(settings.host, listener.getsockname()[1], scheme)
    finally:
        ready.cancel()
        server.should_exit = True
        await serving
        listener.close()


class _Server(uvicorn.Server):
    """Says when it is ready; leaves signals to us; lets the sessions end before the sockets."""

    def __init__(
        self, config: uvicorn.Config, connections: Connections, drain_timeout_s: float
    ) -> None:
        super().__init__(config)
        self._drain_timeout_s = drain_timeout_s
        self.ready = asyncio.Event()
        self._connections = connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        reason = "the server is shutting down"
        # Callers in a turn hear it to its end; whoever comes now is told to come again.
        await self._connections.drain(self._drain_timeout_s, reason)
        await self._connections.close_all(reason)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(settings: Settings) -> socket.socket:
    """A socket at the settings' address, not listening yet. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on host {settings.host!r}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_PEER_MS)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}"
        ) from error
    return listener


def _check_tls(settings: Settings) -> None:
    if settings.tls_cert is None and settings.tls_key is None:
        return
    if settings.tls_cert is None or settings.tls_key is None:
        raise ConfigError("TLS needs both PARLEY_TLS_CERT and PARLEY_TLS_KEY")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"PARLEY_TLS_CERT {settings.tls_cert} and PARLEY_TLS_KEY {settings.tls_key} cannot be "
            f"used: {error}"
        ) from error


def _url(host: str, port: int, scheme: str = "http") -> str:
    """Where a browser on this machine finds the server."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)
    if ":" in shown and not shown.startswith("["):
        shown = f"[{shown}]"
    return f"{scheme}://{shown}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(settings: Settings) -> None:
    """Run until SIGINT or SIGTERM. Prints one line with the URL when callers can connect.

    Raises ConfigError or ModelStoreError when the server cannot start.
    """
    setup_logging(settings)
    for slip in unknown_variables(os.environ, settings):
        logger.warning("%s", slip)
    if not settings.api_keys and not _is_loopback(settings.host):
        logger.warning(
            "anyone who can reach %s can use this server and read its traces: PARLEY_API_KEYS is "
            "not set",
            settings.host or "this machine",
        )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings))


def favour_the_event_loop() -> None:
    """Shorten the pauses that the interpreter itself makes; for the whole process.

    A full garbage collection visits every container. With all that a server has loaded it takes
    some 100 ms, whenever clients have caused enough new ones; so what there is at the start is left
    out from now on. And a thread that parses a long request lets the event loop run after 1 ms
    instead of 5.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


async def _serve(settings: Settings) -> None:
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        """The first one ends the server when its turns are over, a second one at once."""
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    running = asyncio.create_task(_run(settings, hurry), name="server")
    stopping = asyncio.create_task(stop.wait(), name="signals")
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            logger.info("stopping")
            running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    finally:
        stopping.cancel()


async def _run(settings: Settings, hurry: asyncio.Event) -> None:
    _check_tls(settings)
    # The port first: nobody shall wait for models to hear that it is taken.
    with contextlib.closing(bind(settings)) as listener:
        async with build_services(settings) as services:
            app = create_app(settings, services)
            app.state.connections.hurry = hurry
            favour_the_event_loop()
            phones = audiosocket(app.state.phone, settings)
            async with phones, listening(app, settings, listener) as url:
                print(f"Parley is listening on {url}", flush=True)
                await asyncio.Event().wait()  # cancelled by `_serve`
