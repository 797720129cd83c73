"""Medusa heads in PyTorch (Cai et al. 2024, arXiv 2401.10774).

Head k reads the target's final hidden state of the last computed token and predicts the token k + 2
places after it, without seeing the drafts in between: cheap, and less accurate than EAGLE.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from llm_core.speculative.heads.config import HeadConfig
from llm_core.speculative.heads.eagle import TargetEmbeddings, head_shapes, target_ids


class MedusaHeads:
    """``weights``: float32 by the names of ``eagle.head_shapes``, trained in place."""

    def __init__(
        self, config: HeadConfig, tensors: Mapping[str, torch.Tensor], target: TargetEmbeddings
    ) -> None:
        """``tensors`` as in a head's file, with checked shapes. Raises ValueError as
        ``target_ids``."""
        assert config.kind == "medusa"
        self.config = config
        self._target_ids = target_ids(config, tensors)
        self.weights = {name: tensors[name].float() for name in head_shapes(config)}
        self.lm_head = (
            self.weights.pop("lm_head.weight")
            if config.has_lm_head
            else target.lm_head_rows(self._target_ids)
        )

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The hidden state after the final norm."""
        return self.config.feature_layers

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 [draft vocabulary], ascending: the target's token for each draft token."""
        return self._target_ids

    def head_output(self, hidden: torch.Tensor, head: int) -> torch.Tensor:
        """Final hidden states [T, H] -> head ``head``'s prediction [T, H] of a later one."""
        weight = self.weights[f"medusa_head.{head}.0.linear.weight"]
        bias = self.weights[f"medusa_head.{head}.0.linear.bias"]
        return hidden + functional.silu(functional.linear(hidden, weight, bias))

    def draft_logits(self, output: torch.Tensor) -> torch.Tensor:
        """A head's output [T, H] -> float32 [T, draft_vocab_size]."""
        return functional.linear(output, self.lm_head).float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final hidden states [T, H] -> [T, num_medusa_heads, draft_vocab_size]."""
        outputs = [self.head_output(hidden, k) for k in range(self.config.num_medusa_heads)]
        return self.draft_logits(torch.stack(outputs, 1))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors of the heads' file."""
        result = {name: weight.detach().clone() for name, weight in self.weights.items()}
        if self.config.has_draft_vocab:
            ids = self._target_ids
            result["d2t"] = ids - torch.arange(len(ids))
        return result
