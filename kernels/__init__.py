"""Operations of the torch decoder, and the selection of their implementation.

Backends: ``cpu`` (fast) and ``reference`` (plain float32/float64, for tests). Importing this
package needs neither Triton nor CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from kernels import reference
from kernels.kv_runs import KvRun
from kernels.torch_cpu import attention as cpu_attention
from kernels.torch_cpu import elementwise

BackendName = Literal["cpu", "reference"]


class AttentionOp(Protocol):
    """The signature of ``reference.attention_``."""

    def __call__(
        self,
        query: torch.Tensor,
        runs: Sequence[KvRun],
        mask: torch.Tensor | None,
        out: torch.Tensor,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """The operations of one implementation; shapes and semantics are those of ``reference``.

    ``make_rms_norm(weight, eps)`` returns a function ``x [T, H] -> [T, H]``.
    """

    name: BackendName
    make_rms_norm: Callable[[torch.Tensor, float], Callable[[torch.Tensor], torch.Tensor]]
    apply_rope_: Callable[[torch.Tensor, torch.Tensor], None]
    attention_mask: Callable[[int, int, int | None], torch.Tensor | None]
    attention_: AttentionOp
    swiglu: Callable[[torch.Tensor], torch.Tensor]
    geglu: Callable[[torch.Tensor], torch.Tensor]


def select_backend(name: BackendName = "cpu") -> Backend:
    """The operations of backend ``name``."""
    module = {"cpu": elementwise, "reference": reference}[name]
    attention = {"cpu": cpu_attention, "reference": reference}[name]
    return Backend(
        name=name,
        make_rms_norm=module.make_rms_norm,
        apply_rope_=module.apply_rope_,
        attention_mask=attention.attention_mask,
        attention_=attention.attention_,
        swiglu=module.swiglu,
        geglu=module.geglu,
    )
