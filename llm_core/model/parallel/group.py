"""The processes that run one model together: their sums and joins, and what rank 0 tells others.

torch.distributed: NCCL between GPUs, gloo between CPUs and for messages. All ranks are on one
machine; they find each other by a file in a folder that only this user can read, and talk over the
loopback interface, so nothing is opened to the network.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

_MEETING_TIMEOUT = timedelta(minutes=2)
# A rank that waits for the next step waits as long as nobody speaks; what ends it is rank 0's end.
_STEP_TIMEOUT = timedelta(days=365)
_MESSAGE_LEN = 4096  # int32 words of the first part: a decode step of 64 rows fits


class PendingSum(Protocol):
    """A sum over ranks that was begun."""

    def wait(self) -> torch.Tensor:
        """The sum. On a GPU it is the stream that waits, not the host."""


class Collectives(Protocol):
    """What a decoder needs of the other ranks. Called by all ranks, in the same order."""

    num_ranks: int

    def start_sum(self, x: torch.Tensor) -> PendingSum:
        """Begins to make x the sum of all ranks' x, on each of them."""

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """[R, W] of each rank (W the same on all) -> [R, num_ranks * W], in the order of ranks."""


@dataclass(frozen=True, slots=True)
class Summed:
    """There is nothing to wait for."""

    x: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.x


@dataclass(frozen=True, slots=True)
class _Summing:
    x: torch.Tensor
    work: Any  # torch.distributed's

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.x


class Alone:
    """One rank: there is nothing to add."""

    num_ranks = 1

    def start_sum(self, x: torch.Tensor) -> PendingSum:
        return Summed(x)

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        return x


class RankGroup:
    """This process's place among ``num_ranks``. Made once a process: joining waits for the others.

    Raises RuntimeError (of torch.distributed) when they do not come, or when one of them is gone.
    """

    def __init__(self, folder: Path, *, rank: int, num_ranks: int, is_cuda: bool) -> None:
        """``folder`` is private to the ranks. On CUDA the current device must be this rank's."""
        self.rank = rank
        self.num_ranks = num_ranks
        # One machine: without this, gloo and NCCL listen on whatever the host's name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        store = dist.FileStore(str(folder / "meeting"), num_ranks)  # type: ignore[attr-defined]
        store.set_timeout(_MEETING_TIMEOUT)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=num_ranks,
            timeout=_STEP_TIMEOUT,
        )

    def start_sum(self, x: torch.Tensor) -> PendingSum:
        """As in ``Collectives``."""
        work = dist.all_reduce(x, async_op=True)
        assert work is not None, "this process is in the group"
        return _Summing(x, work)

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """As in ``Collectives``."""
        parts = [torch.empty_like(x) for _ in range(self.num_ranks)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    def announce(self, words: torch.Tensor) -> None:
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

    def hear(self) -> torch.Tensor:
        """The next words that rank 0 announces, int32 [n]; waits for them."""
        first = torch.empty(_MESSAGE_LEN, dtype=torch.int32)
        dist.broadcast(first, 0)
        num_words = int(first[0])
        if num_words < _MESSAGE_LEN:
            return first[1 : 1 + num_words]
        rest = torch.empty(num_words - _MESSAGE_LEN + 1, dtype=torch.int32)
        dist.broadcast(rest, 0)
        return torch.cat((first[1:], rest))

    def meet(self) -> None:
        """Returns when all ranks have come here."""
        dist.all_reduce(torch.zeros(1))  # on the CPU: a barrier would be NCCL's where there is one

    def close(self) -> None:
        """Leaves the group; tests need it, a process that ends does not."""
        dist.destroy_process_group()
