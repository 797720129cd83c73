"""Medusa heads in torch (Cai et al. 2024, arXiv 2401.10774): each says one place further ahead.

Head k reads the target's final hidden state of the last computed token and says what comes k + 2
places behind it, without knowing what was drafted in between: cheap, and less often right.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from llm_core.speculative.heads.config import HeadConfig
from llm_core.speculative.heads.eagle import TargetRows, head_shapes, target_ids


class MedusaHeads:
    """``weights``: float32 by the names of ``eagle.head_shapes``."""

    def __init__(
        self, config: HeadConfig, tensors: Mapping[str, torch.Tensor], target: TargetRows
    ) -> None:
        """``tensors`` as in a head's file, shapes checked."""
        assert config.kind == "medusa"
        self.config = config
        self._target_ids = target_ids(config, tensors)
        self.weights = {name: tensors[name].float() for name in head_shapes(config)}
        self.words = (
            self.weights.pop("lm_head.weight")
            if config.has_lm_head
            else target.head_rows(self._target_ids)
        )

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The hidden state after the final norm."""
        return self.config.feature_layers

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 [draft vocabulary], ascending: which token of the target each draft word is."""
        return self._target_ids

    def output(self, hidden: torch.Tensor, head: int) -> torch.Tensor:
        """Final hidden states [T, H] -> what head ``head`` expects to be the one it speaks of."""
        weight = self.weights[f"medusa_head.{head}.0.linear.weight"]
        bias = self.weights[f"medusa_head.{head}.0.linear.bias"]
        return hidden + functional.silu(functional.linear(hidden, weight, bias))

    def word_logits(self, output: torch.Tensor) -> torch.Tensor:
        """A head's ``output`` [T, H] -> [T, draft_vocab_size]."""
        return functional.linear(output, self.words).float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final hidden states [T, H] -> [T, num_medusa_heads, draft_vocab_size]: head k's of what
        follows the token after by k + 1 places."""
        outputs = [self.output(hidden, k) for k in range(self.config.num_medusa_heads)]
        return self.word_logits(torch.stack(outputs, 1))

    def tensors(self) -> dict[str, torch.Tensor]:
        """What the heads' file holds."""
        result = {name: weight.detach().clone() for name, weight in self.weights.items()}
        if self.config.has_draft_vocab:
            ids = self._target_ids
            result["d2t"] = ids - torch.arange(len(ids))
        return result
