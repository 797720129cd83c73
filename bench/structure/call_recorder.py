"""Records the functions that run in a Python process, without any change to its program.

``bench.structure.turn_path`` copies this file as ``sitecustomize.py`` into a folder on PYTHONPATH,
so every Python process of the server imports it at start-up: the server and its engine. It uses the
standard library only, because it must also work with other source trees.

Environment: ``PARLEY_RECORDER_ROOT`` is the source tree whose functions are recorded;
``PARLEY_RECORDER_DIR`` is a folder shared with the driver. The driver writes the name of a phase
into the file ``phase``; when that changes, each process writes what it recorded in the phase before
to ``<phase>.<pid>.json``. An empty name stops recording.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_POLL_S = 0.02
_CO_OPTIMIZED = 0x1  # set for functions, unset for the bodies of modules and classes


class _Calls:
    """How often one function was called; a resumed coroutine or generator counts again."""

    __slots__ = ("code", "num_calls")

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.num_calls = 0


class CallRecorder:
    """The profile function of all threads of this process, and the thread that follows phases."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root = root
        self._folder = folder
        self._phase = ""
        # By identity: to hash a code object costs more than the call. ``_Calls`` keeps it alive.
        self._calls: dict[int, _Calls] = {}
        self._is_on = [False]  # a list, so that the profile function need not look up attributes

    def install(self) -> None:
        """Start to follow phases; profile this thread and those that are started from now on."""
        self._write("process", {"orig_argv": sys.orig_argv})
        threading.Thread(target=self._follow_phases, name="call-recorder", daemon=True).start()
        profile = self._profile_function()
        threading.setprofile(profile)
        sys.setprofile(profile)

    def _profile_function(self) -> Callable[[FrameType, str, Any], None]:
        calls, is_on = self._calls, self._is_on

        def profile(frame: FrameType, event: str, argument: Any) -> None:
            if not is_on[0]:
                return
            code = frame.f_code
            found = calls.get(id(code))
            if found is None:
                # Any event shows that a function runs: a loop that was entered before the phase is
                # seen when it calls a C function.
                found = calls[id(code)] = _Calls(code)
            if event == "call":
                found.num_calls += 1

        return profile

    def _follow_phases(self) -> None:
        while True:
            time.sleep(_POLL_S)
            try:
                phase = (self._folder / "phase").read_text()
            except OSError:
                continue
            if phase == self._phase:
                continue
            calls = dict(self._calls)
            self._is_on[0] = bool(phase)
            self._calls.clear()
            if self._phase:
                self._write(self._phase, self._summary(calls))
            self._phase = phase

    def _summary(self, calls: dict[int, _Calls]) -> dict[str, Any]:
        prefix = f"{self._root}{os.sep}"
        functions: dict[str, dict[str, int]] = {}
        for item in calls.values():
            code = item.code
            if not code.co_filename.startswith(prefix) or not code.co_flags & _CO_OPTIMIZED:
                continue
            by_name = functions.setdefault(code.co_filename.removeprefix(prefix), {})
            by_name[code.co_qualname] = by_name.get(code.co_qualname, 0) + item.num_calls
        return {"functions": functions, "libraries": _mapped_libraries()}

    def _write(self, name: str, contents: dict[str, Any]) -> None:
        path = self._folder / f"{name}.{os.getpid()}.json"
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(contents))
        partial.replace(path)


def _mapped_libraries() -> list[str]:
    """Shared libraries that this process has loaded, by file name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({Path(line.split(maxsplit=5)[5]).name for line in lines if ".so" in line})


if "PARLEY_RECORDER_DIR" in os.environ and __name__ == "sitecustomize":
    CallRecorder(
        Path(os.environ["PARLEY_RECORDER_ROOT"]), Path(os.environ["PARLEY_RECORDER_DIR"])
    ).install()
