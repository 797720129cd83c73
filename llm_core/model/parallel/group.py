"""The process group of a tensor-parallel model: collectives, and messages from rank 0.

torch.distributed: NCCL between GPUs, gloo between CPUs and for messages. All ranks are on one
machine; they rendezvous by a file in a folder that only this user can read, and communicate over
the loopback interface, so no port is open to the network.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

_RENDEZVOUS_TIMEOUT = timedelta(minutes=2)
# Ranks wait for the next step for as long as the engine is idle; they exit with rank 0.
_STEP_TIMEOUT = timedelta(days=365)
_MESSAGE_LEN = 4096  # int32 words of the first part, enough for a decode step of 64 rows


class PendingSum(Protocol):
    """An all-reduce in progress."""

    def wait(self) -> torch.Tensor:
        """The sum. On a GPU the stream waits for it, not the host."""


class Collectives(Protocol):
    """Collective operations of a decoder. All ranks must call them in the same order."""

    num_ranks: int

    def start_sum(self, x: torch.Tensor) -> PendingSum:
        """Starts an in-place all-reduce of x."""

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """All-gathers [R, W] of each rank to [R, num_ranks * W]; W is the same on all ranks."""


@dataclass(frozen=True, slots=True)
class Summed:
    """A sum that is already complete."""

    x: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.x


@dataclass(frozen=True, slots=True)
class _Summing:
    x: torch.Tensor
    work: Any  # of torch.distributed

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.x


class Alone:
    """The collectives of a single rank."""

    num_ranks = 1

    def start_sum(self, x: torch.Tensor) -> PendingSum:
        return Summed(x)

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        return x


class RankGroup:
    """This process's rank in a group of ``num_ranks``; one per process. The constructor waits for
    the other ranks.

    Raises RuntimeError (of torch.distributed) if they do not join, or if one of them has exited.
    """

    def __init__(self, folder: Path, *, rank: int, num_ranks: int, is_cuda: bool) -> None:
        """``folder``: private to the ranks. On CUDA the current device must be this rank's."""
        self.rank = rank
        self.num_ranks = num_ranks
        # By default gloo and NCCL listen on the address that the host name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        store = dist.FileStore(str(folder / "meeting"), num_ranks)  # type: ignore[attr-defined]
        store.set_timeout(_RENDEZVOUS_TIMEOUT)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=num_ranks,
            timeout=_STEP_TIMEOUT,
        )

    def start_sum(self, x: torch.Tensor) -> PendingSum:
        """See ``Collectives``."""
        work = dist.all_reduce(x, async_op=True)
        assert work is not None, "this process is a member of the group"
        return _Summing(x, work)

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Collectives``."""
        parts = [torch.empty_like(x) for _ in range(self.num_ranks)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    def broadcast(self, words: torch.Tensor) -> None:
        """Rank 0 says int32 words [n] (CPU) to all others."""
        assert self.rank == 0 and words.dtype == torch.int32
        first = torch.zeros(_MESSAGE_LEN, dtype=torch.int32)
        num_words = words.shape[0]
        first[0] = num_words
        at = min(num_words, _MESSAGE_LEN - 1)
        first[1 : 1 + at] = words[:at]
        dist.broadcast(first, 0)
        if at < num_words:
            dist.broadcast(words[at:].contiguous(), 0)

    def receive(self) -> torch.Tensor:
        """Waits for the next message of rank 0, int32 [n]."""
        first = torch.empty(_MESSAGE_LEN, dtype=torch.int32)
        dist.broadcast(first, 0)
        num_words = int(first[0])
        if num_words < _MESSAGE_LEN:
            return first[1 : 1 + num_words]
        rest = torch.empty(num_words - _MESSAGE_LEN + 1, dtype=torch.int32)
        dist.broadcast(rest, 0)
        return torch.cat((first[1:], rest))

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        dist.all_reduce(torch.zeros(1))  # on the CPU; dist.barrier would use NCCL

    def close(self) -> None:
        """Leaves the group; only needed by tests, as the end of the process does so too."""
        dist.destroy_process_group()
