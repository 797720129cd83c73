"""Operations of a GPU step that are left to torch, optionally compiled by ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """``cap`` * tanh(logits / ``cap``), possibly in place (Gemma 2)."""
    return logits.div_(cap).tanh_().mul_(cap)


def _capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    # Out of place: it compiles to one kernel either way.
    return torch.tanh(logits / cap) * cap


class TorchParts:
    """The torch operations of a decoder."""

    def __init__(self, compile_on: torch.device | None = None) -> None:
        """Compiles the operations for ``compile_on``, unless None. Raises ValueError if a first
        compilation fails."""
        self.capped = capped
        if compile_on is None:
            return
        self.capped = _compiled(_capped)
        try:
            self.capped(torch.ones(2, 3, device=compile_on), 2.0)
        # Compilers raise exceptions of many types; the caller needs the reason.
        except Exception as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ValueError(f"torch.compile does not work here: {reason}") from error


def _compiled(function: Function) -> Function:
    # Sizes change with every step, so compile for dynamic shapes.
    return cast(Function, torch.compile(function, dynamic=True))
