"""The threads between the engine's step loop and its client: commands in, events and signs of life
out."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from llm_core.ipc import Alive, Command, Event, ProtocolError, encode_events, receive_command
from llm_core.progress import Progress
from llm_core.structured.preparation import Prepared

logger = logging.getLogger("llm_core.worker")

_EXIT_GRACE_S = 2.0
_MAX_COMMANDS = 1024


@dataclass(frozen=True, slots=True)
class Received:
    """``received_ns``: of the monotonic clock."""

    command: Command
    received_ns: int


class Inbox:
    """Commands from the socket, stamped as they arrive, and guides that are ready; None in the
    queue is the end.

    Bounded: when it is full the reader thread waits, the socket fills, and the client's own
    writing waits in turn. Nothing is dropped.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._queue: queue.Queue[Received | Prepared | None] = queue.Queue(_MAX_COMMANDS)
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._read, name="llm-commands", daemon=True)
        self._thread.start()

    def put(self, prepared: Prepared) -> None:
        """Any thread."""
        self._queue.put(prepared)

    def take(self, *, wait: bool) -> list[Received | Prepared] | None:
        """All that has arrived, after waiting for at least one if asked to; None at the end."""
        taken: list[Received | Prepared] = []
        try:
            item = self._queue.get(block=wait)
            while item is not None:
                taken.append(item)
                item = self._queue.get_nowait()
        except queue.Empty:
            return taken
        return None

    def finish(self) -> None:
        """The main thread is done; the reader need not end the process by force."""
        self._finished.set()

    def _read(self) -> None:
        try:
            while (command := receive_command(self._connection)) is not None:
                self._queue.put(Received(command, time.monotonic_ns()))
        except ProtocolError as error:
            logger.error("command not understood: %s", error)
        try:
            self._queue.put(None, timeout=_EXIT_GRACE_S)
        except queue.Full:
            logger.warning("the step loop does not take commands any more")
        # The main thread may be deep in loading a model; the parent is gone, so go too.
        if not self._finished.wait(_EXIT_GRACE_S):
            os._exit(1)


class Outbox:
    """Events to the client, of any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, events: list[Event]) -> None:
        """Waits while the client does not read."""
        with self._lock:
            try:
                self._connection.sendall(encode_events(events))
            except ConnectionError:
                # The client is gone; the inbox reports the end of its side, and ends the loop.
                logger.info("the client has closed the connection")


class Heart:
    """Tells the client that the process lives, and how long ``threads`` have been busy."""

    def __init__(self, outbox: Outbox, period_s: float) -> None:
        self._period_s = period_s
        self.threads: Sequence[Progress] = ()
        self._outbox = outbox
        self._stopped = threading.Event()
        self.beat()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        states = [progress.now() for progress in self.threads]
        self._outbox.send([Alive([(doing, ns // 1_000_000) for doing, ns in states])])

    def stop(self) -> None:
        """The socket may be closed now."""
        self._stopped.set()
        self._thread.join(_EXIT_GRACE_S)

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            self.beat()
