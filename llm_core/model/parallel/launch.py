"""Rank 0's side of starting the other ranks, one process each, which live as long as rank 0.

engine process = rank 0        python -m llm_core.model.parallel.follower --rank N --folder DIR
EngineConfig, one JSON line -> its standard input; it exits when that is closed
"""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from kernels.gpu import is_interpreted
from llm_core.child_process import importable, module_command
from llm_core.errors import ModelLoadError
from llm_core.messages import EngineConfig
from llm_core.model.parallel.group import RankGroup
from llm_core.process_logging import log_arguments

logger = logging.getLogger("llm_core.model.parallel")

_EXIT_TIMEOUT_S = 5.0


def join(folder: Path, rank: int, num_ranks: int) -> RankGroup:
    """Joins the group in ``folder`` as rank ``rank``, on the GPU of that index. Raises RuntimeError
    if the other ranks do not join."""
    is_cuda = not is_interpreted()
    if is_cuda:
        torch.cuda.set_device(rank)
    return RankGroup(folder, rank=rank, num_ranks=num_ranks, is_cuda=is_cuda)


class Followers:
    """The processes of ranks 1 to ``config.tensor_parallel`` - 1."""

    def __init__(self, config: EngineConfig, no_gpu: str | None) -> None:
        """``no_gpu``: the reason why there is no usable GPU, if so. Raises ModelLoadError for that,
        for too few GPUs, and if a process cannot be started."""
        num_ranks = config.tensor_parallel
        if no_gpu is None and not is_interpreted() and torch.cuda.device_count() < num_ranks:
            no_gpu = f"there are {torch.cuda.device_count()} GPUs"
        if no_gpu is not None:
            raise ModelLoadError(f"tensor_parallel is {num_ranks}, but {no_gpu}")
        self._folder = tempfile.TemporaryDirectory(prefix="parley-ranks-")  # of mode 700
        self._is_closing = False
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, num_ranks):
                process = _start(config, rank, self._folder.name)
                self._processes.append(process)
                _send(process, config)
        except OSError as error:
            self.close()
            raise ModelLoadError(f"a rank's process cannot be started: {error}") from error

    def join(self) -> RankGroup:
        """Joins as rank 0, when all ranks have joined. Raises ModelLoadError."""
        try:
            return join(Path(self._folder.name), 0, len(self._processes) + 1)
        except RuntimeError as error:
            raise ModelLoadError(f"the ranks of the model did not meet: {error}") from error

    def wait_until_loaded(self, group: RankGroup) -> None:
        """Returns when all ranks have loaded their share; from then on the exit of one ends this
        process. Raises ModelLoadError if one has failed, for the reason in its log."""
        try:
            group.barrier()
        except RuntimeError as error:
            raise ModelLoadError(f"a rank has not loaded its share: {error}") from error
        self._watch_all()

    def _watch_all(self) -> None:
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(
                target=self._watch, args=(rank, process), daemon=True, name=f"rank-{rank}"
            ).start()

    def close(self) -> None:
        """Stops the processes and waits for them."""
        self._is_closing = True
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it exited before it read its configuration
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Ends this process when a rank exits: an all-reduce would wait for it forever."""
        status = process.wait()
        if not self._is_closing:
            logger.error("rank %d of the model has ended with status %d", rank, status)
            os._exit(1)


def _start(config: EngineConfig, rank: int, folder: str) -> subprocess.Popen[bytes]:
    place = ("--rank", str(rank), "--folder", folder)
    log = log_arguments(logger, config.log_format)
    return subprocess.Popen(
        module_command("llm_core.model.parallel.follower", *place, *log),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=importable(os.environ),
    )


def _send(process: subprocess.Popen[bytes], config: EngineConfig) -> None:
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(config) + b"\n")
    process.stdin.flush()
