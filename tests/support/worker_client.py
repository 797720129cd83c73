"""An engine's worker on a thread of this process, with its client's end in the test's hands."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgspec

from llm_core import ipc
from llm_core.engine.engine import Engine
from llm_core.messages import ChatMessage, Guide, RequestOptions, SamplingParams
from llm_core.structured.grammar import Grammar, grammar_of
from llm_core.structured.preparation import GuideDesk
from llm_core.worker import Worker
from llm_core.worker_io import Inbox, Outbox


class GatedChecker:
    """Lets all guides pass, once ``gate`` is open; those of ``refused`` with their error."""

    def __init__(self) -> None:
        self.is_at_work = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.asked: list[Guide] = []
        self.refused: dict[Guide, Exception] = {}

    def start(self) -> None: ...

    def close(self) -> None: ...

    def check(self, guide: Guide) -> tuple[Grammar, int]:
        self.asked.append(guide)
        self.is_at_work.set()
        assert self.gate.wait(30)
        if guide in self.refused:
            raise self.refused[guide]
        return grammar_of(guide, "hermes"), 0


class WorkerClient:
    """Sends commands and collects events."""

    def __init__(self, connection: socket.socket, checker: GatedChecker) -> None:
        self.checker = checker
        self.events: list[ipc.Event] = []
        self._unread: list[ipc.Event] = []
        self.fault: BaseException | None = None
        self._connection = connection

    def send(self, *commands: ipc.Command) -> None:
        for command in commands:
            self._connection.sendall(ipc.encode_command(command))

    def generate(self, request_id: int, text: str = "Hello", **params: Any) -> None:
        """A reply of ten tokens, unless ``params`` say otherwise."""
        values = {"max_tokens": 10, "ignore_eos": True, **params}
        self.send(ipc.Generate(request_id, user(text), SamplingParams(**values), RequestOptions()))

    def until(self, is_it: Callable[[ipc.Event], bool]) -> ipc.Event:
        """The first event that ``is_it`` of those that were not returned yet."""
        while True:
            for event in self._unread:
                if is_it(event):
                    self._unread.remove(event)
                    return event
            header = self._connection.recv(4, socket.MSG_WAITALL)
            assert len(header) == 4, "the worker has ended"
            length = int.from_bytes(header, "little")
            payload = self._connection.recv(length, socket.MSG_WAITALL)
            batch = msgspec.msgpack.decode(payload, type=list[ipc.Event])
            self.events += batch
            self._unread += batch

    def end_of(self, request_id: int) -> ipc.Event:
        """The last event of a request."""

        def ends(event: ipc.Event) -> bool:
            if getattr(event, "request_id", None) != request_id:
                return False
            is_done = isinstance(event, ipc.Generated) and hasattr(event.event, "finish_reason")
            others = ipc.Failed | ipc.Stats | ipc.Prefilled | ipc.GuidePrepared
            return is_done or isinstance(event, others)

        return self.until(ends)

    def stats(self, request_id: int) -> Any:
        self.send(ipc.GetStats(request_id))
        event = self.end_of(request_id)
        assert isinstance(event, ipc.Stats)
        return event.stats


def user(text: str) -> tuple[ChatMessage, ...]:
    return (ChatMessage("user", text),)


@contextmanager
def working(
    engine: Engine, *, max_held: int = 4, known: dict[bytes, int] | None = None
) -> Iterator[WorkerClient]:
    """The worker runs during the block; ``fault`` then says what has ended it, if anything did."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.settimeout(30)
    checker = GatedChecker()
    client = WorkerClient(ours, checker)
    inbox = Inbox(theirs)
    desk = GuideDesk(engine.guides, cast(Any, checker), inbox.put, known)
    worker = Worker(engine, inbox, Outbox(theirs), desk, max_held)

    def run() -> None:
        try:
            worker.run()
        except BaseException as error:
            client.fault = error
        finally:
            inbox.finish()
            theirs.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with ours, theirs:
            try:
                yield client
            finally:
                checker.gate.set()
                desk.close()
                ours.shutdown(socket.SHUT_WR)
                thread.join(30)
    finally:
        assert not thread.is_alive()
