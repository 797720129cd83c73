"""Makes guides ready beside the engine's steps: checks them, then compiles them, one at a time."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llm_core.errors import InvalidRequestError, LlmError
from llm_core.faults import failure_of
from llm_core.messages import Guide
from llm_core.progress import Progress
from llm_core.structured.checker import GuideChecker
from llm_core.structured.checker_process import NICENESS
from llm_core.structured.constraint import CompiledGuide, GuideCompiler
from llm_core.structured.grammar import MAX_KNOWN, grammar_of

logger = logging.getLogger("llm_core.structured.preparation")


@dataclass(frozen=True, slots=True)
class Prepared:
    """What has become of the guide with this key."""

    key: bytes
    outcome: CompiledGuide | LlmError


class GuideDesk:
    """A thread that makes guides ready. Those of higher priority come first.

    Its queue holds each guide once; the worker bounds how many requests wait.
    """

    def __init__(
        self,
        compiler: GuideCompiler,
        checker: GuideChecker | None,
        done: Callable[[Prepared], None],
        known: Mapping[bytes, int] | None = None,
    ) -> None:
        """``checker`` None: no guide can be followed. ``done`` is called on the thread. ``known``:
        guides that another process has checked, as the bytes they take by their keys."""
        self.progress = Progress()
        self._compiler = compiler
        self._checker = checker
        self._done = done
        self._known = OrderedDict(known or {})
        self._order = itertools.count()
        self._queue: queue.PriorityQueue[tuple[int, int, bytes, Guide | None]] = (
            queue.PriorityQueue()
        )
        threading.Thread(target=self._run, name="guides", daemon=True).start()

    def ask(self, key: bytes, guide: Guide, priority: int) -> None:
        """``done`` will be called for this guide."""
        self._queue.put((-priority, next(self._order), key, guide))

    def close(self) -> None:
        """Ends the thread when it is done with its guide. Does not wait."""
        self._queue.put((-sys.maxsize, 0, b"", None))

    def _run(self) -> None:
        self._warm_up()
        if sys.platform == "linux":  # elsewhere a thread has no niceness of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            _, _, key, guide = self._queue.get()
            if guide is None:
                break
            self._done(Prepared(key, self._prepare(key, guide)))
        if self._checker is not None:
            self._checker.close()

    def _warm_up(self) -> None:
        """So that the first guide does not wait for it."""
        if self._checker is None:
            return
        try:
            self._checker.start()
            self._compiler.read_vocabulary()
        except Exception:  # the first guide meets it again, and fails
            logger.exception("guides cannot be followed")

    def _prepare(self, key: bytes, guide: Guide) -> CompiledGuide | LlmError:
        try:
            if self._checker is None:
                raise InvalidRequestError("this model has no end token to end a guided reply with")
            if key in self._known:
                grammar = grammar_of(guide, self._compiler.tool_format)
                num_bytes = self._known[key]
            else:
                grammar, num_bytes = self._checker.check(guide)
                self._known[key] = num_bytes
                if len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)
            with self.progress.at("guide"):
                return self._compiler.compile(grammar, num_bytes)
        except BaseException as error:
            return failure_of(error, "a guide")
