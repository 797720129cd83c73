"""From the end of a turn to the store and all others who look at turns, off the event loop.

``TraceWriter.add`` is all that a turn pays: an append to a queue. One thread does the rest.
"""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from app.observe.retention import RetentionClock
from app.observe.store import TraceStore, Turn
from app.observe.turn_audio import AudioFiles, TurnAudio

log = logging.getLogger(__name__)

MAX_QUEUED = 4096
_BATCH = 256
_PRUNE_EVERY_S = 60.0
_COMPLAIN_EVERY_S = 60.0

TurnSink = Callable[[Turn], None]


class _Ended(NamedTuple):
    turn: Turn
    audio: TurnAudio | None


class TraceWriter:
    """Bounded queue and writer thread before a store.

    Overflow rule: when ``max_queued`` turns wait (the disk hangs), the new one is dropped, counted
    in ``num_dropped`` and complained about in the log; a call never waits for its trace.

    A turn counts as running until it is committed, a few milliseconds after its end: that much is
    lost when the process is killed, and nothing else.
    """

    def __init__(
        self,
        store: TraceStore,
        *,
        store_transcripts: bool = False,
        recordings: AudioFiles | None = None,
        sinks: Sequence[TurnSink] = (),
        max_queued: int = MAX_QUEUED,
    ) -> None:
        self.store = store
        self.num_dropped = 0
        self.recordings = recordings
        self._keeps_words = store_transcripts
        self._sinks = tuple(sinks)
        self._queue: queue.Queue[_Ended | None] = queue.Queue(max_queued)
        self._thread: threading.Thread | None = None
        self._complained_s = float("-inf")
        self._clock: RetentionClock | None = None  # made with the first look at what is kept

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="trace writer", daemon=True)
        self._thread.start()

    def add(self, turn: Turn, audio: TurnAudio | None = None) -> None:
        """Keep a finished turn (``TurnTrace.to_dict``), and its sound. Never waits."""
        try:
            self._queue.put_nowait(_Ended(turn, audio))
        except queue.Full:
            self._lose(1, "the queue is full")

    def flush(self) -> None:
        """Wait until all that was added is committed, or lost and complained about."""
        self._queue.join()

    def close(self) -> None:
        """Write what waits and stop. The store stays open."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        pruned_s = time.monotonic()
        self._prune()
        is_open = True
        while is_open:
            batch, is_open = self._next_batch()
            try:
                self.write([ended.turn for ended in batch])
                self._write_audio(batch)
            except Exception:
                # The boundary: without this thread every further turn would be lost, and whoever
                # waits in `flush` would wait for ever.
                log.exception("the end of a turn could not be recorded")
            for _ in range(len(batch) + (not is_open)):
                self._queue.task_done()
            if time.monotonic() - pruned_s > _PRUNE_EVERY_S:
                pruned_s = time.monotonic()
                self._prune()

    def _write_audio(self, batch: list[_Ended]) -> None:
        for ended in batch:
            if ended.audio is None or self.recordings is None:
                continue
            try:
                self.recordings.write(ended.turn["turn_id"], ended.audio.to_wav())
            except OSError as error:
                self._complain("a recording is lost: %s", error)

    def _next_batch(self) -> tuple[list[_Ended], bool]:
        """What waits, at most ``_BATCH``; False with the last one."""
        batch: list[_Ended] = []
        try:
            ended = self._queue.get(timeout=_PRUNE_EVERY_S)
            while ended is not None and len(batch) < _BATCH - 1:
                batch.append(ended)
                ended = self._queue.get_nowait()
        except queue.Empty:
            return batch, True
        if ended is not None:
            batch.append(ended)
        return batch, ended is not None

    def write(self, batch: list[Turn]) -> None:
        """Store ``batch`` and show it to the sinks, on the calling thread."""
        if not batch:
            return
        kept = batch if self._keeps_words else [without_words(turn) for turn in batch]
        try:
            self.store.write(kept)
        except (sqlite3.Error, TypeError, ValueError, KeyError) as error:  # the disk; or no record
            self._lose(len(batch), str(error))
        for sink in self._sinks:
            for turn in kept:
                self._show(sink, turn)

    def _show(self, sink: TurnSink, turn: Turn) -> None:
        try:
            sink(turn)
        except Exception:
            # The boundary: one observer's fault must not take the turns from the others.
            log.exception("a turn could not be observed")

    def _prune(self) -> None:
        try:
            now_s = self._retention_time_s()
            deleted = self.store.prune(now_s)
            if self.recordings is not None:
                self.recordings.prune(now_s)
        except (sqlite3.Error, OSError) as error:
            self._complain("old traces could not be deleted: %s", error)
        else:
            if deleted:
                log.info("old traces deleted", extra={"turns": deleted})

    def _retention_time_s(self) -> float | None:
        """See ``RetentionClock.now_s``; None also where nothing goes for its age."""
        if self._clock is None:
            ages_s, newest_s = [self.store.retention.max_age_s], [self.store.newest_s()]
            if self.recordings is not None:
                ages_s.append(self.recordings.max_age_s)
                newest_s.append(self.recordings.newest_s())
            limits_s = [age_s for age_s in ages_s if age_s is not None]
            if not limits_s:
                return None
            newest = max((at_s for at_s in newest_s if at_s is not None), default=None)
            self._clock = RetentionClock(min(limits_s), newest)
        return self._clock.now_s()

    def _lose(self, number: int, why: str) -> None:
        self.num_dropped += number
        self._complain("traces are lost (%s)", why, extra={"dropped": self.num_dropped})

    def _complain(self, message: str, *args: Any, **fields: Any) -> None:
        """A full disk would say the same for every turn."""
        if time.monotonic() - self._complained_s > _COMPLAIN_EVERY_S:
            self._complained_s = time.monotonic()
            log.error(message, *args, **fields)


def without_words(turn: Turn) -> Turn:
    """A copy that says how much was said, and not what."""
    facts = {
        **turn["facts"],
        "transcript_chars": len(turn["transcript"]),
        "reply_chars": len(turn["reply"]),
    }
    kept = {name: value for name, value in turn.items() if name != "words"}
    return {**kept, "transcript": "", "reply": "", "facts": facts}
