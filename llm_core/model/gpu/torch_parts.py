"""What a GPU step leaves to torch, as it is or compiled (``torch.compile``) into fewer kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """``cap`` * tanh(logits / ``cap``), perhaps in place (Gemma 2)."""
    return logits.div_(cap).tanh_().mul_(cap)


def _capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    # Out of place: compiled, it is one kernel either way.
    return torch.tanh(logits / cap) * cap


class TorchParts:
    """``capped``."""

    def __init__(self, compile_on: torch.device | None = None) -> None:
        """Compiled for ``compile_on``; None: as they are. Raises ValueError where there is no
        compiler that works, which a first compilation finds out."""
        self.capped = capped
        if compile_on is None:
            return
        self.capped = _compiled(_capped)
        try:
            self.capped(torch.ones(2, 3, device=compile_on), 2.0)
        # What compilers raise is as diverse as they are; the reason is what the caller needs.
        except Exception as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ValueError(f"torch.compile does not work here: {reason}") from error


def _compiled(function: Function) -> Function:
    # Sizes change with every step: one program for all of them.
    return cast(Function, torch.compile(function, dynamic=True))
