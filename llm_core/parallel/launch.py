"""Rank 0's side of starting the others: one process a rank, which lives as long as this one.

    engine process = rank 0        python -m llm_core.parallel.follower --rank N --folder DIR
    EngineConfig, one JSON line -> its standard input, which stays open: its end is the process's
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from llm_core.errors import ModelLoadError
from llm_core.messages import EngineConfig
from llm_core.parallel.group import RankGroup

logger = logging.getLogger("llm_core.parallel")

_EXIT_TIMEOUT_S = 5.0


class Followers:
    """The processes of ranks 1 to ``config.tensor_parallel`` - 1."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ModelLoadError when one cannot be started."""
        self._folder = tempfile.TemporaryDirectory(prefix="parley-ranks-")  # of mode 700
        self._is_closing = False
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, config.tensor_parallel):
                self._processes.append(_start(config, rank, self._folder.name))
        except OSError as error:
            self.close()
            raise ModelLoadError(f"a rank's process cannot be started: {error}") from error

    @property
    def folder(self) -> Path:
        """Where the ranks meet."""
        return Path(self._folder.name)

    def join(self, *, is_cuda: bool) -> RankGroup:
        """Rank 0 of the group, when all have come. Raises ModelLoadError."""
        try:
            return RankGroup(
                self.folder, rank=0, num_ranks=len(self._processes) + 1, is_cuda=is_cuda
            )
        except RuntimeError as error:
            self.close()
            raise ModelLoadError(f"the ranks of the model did not meet: {error}") from error

    def watch(self, on_death: Callable[[], None] | None = None) -> None:
        """From now on the end of a rank ends this process (or calls ``on_death``): a sum in which
        one rank is missing would wait for ever."""
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(
                target=self._watch, args=(rank, process, on_death), daemon=True, name=f"rank-{rank}"
            ).start()

    def close(self) -> None:
        """Ends the processes and waits for them."""
        self._is_closing = True
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def _watch(
        self, rank: int, process: subprocess.Popen[bytes], on_death: Callable[[], None] | None
    ) -> None:
        status = process.wait()
        if self._is_closing:
            return
        logger.error("rank %d of the model has ended with status %d", rank, status)
        if on_death is not None:
            on_death()
        else:
            os._exit(1)


def _start(config: EngineConfig, rank: int, folder: str) -> subprocess.Popen[bytes]:
    level = logging.getLevelName(logger.getEffectiveLevel())
    command = [sys.executable, "-P", "-m", "llm_core.parallel.follower", "--rank", str(rank)]
    environment = dict(os.environ)
    ours = str(Path(__file__).resolve().parent.parent.parent)
    others = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{ours}{os.pathsep}{others}" if others else ours
    process = subprocess.Popen(
        [*command, "--folder", folder, "--log-level", level],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment,
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(config) + b"\n")
    process.stdin.flush()
    return process
