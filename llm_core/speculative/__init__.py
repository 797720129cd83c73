"""Speculative decoding: cheap guesses at what comes next, and one forward that checks them all.

A drafter proposes a tree of tokens for each sequence (``drafter``, ``tree``); the target computes
all trees of a batch together, beside the prompts' chunks; ``accept`` walks down as long as what the
target says is among the guesses. The output is what plain decoding would have said, token by token
(Leviathan et al. 2022, arXiv 2211.17192, made simpler by random numbers that depend on a token's
position alone).
"""

from llm_core.speculative.accept import accept
from llm_core.speculative.control.base import BatchState, Controller
from llm_core.speculative.counts import SpeculationCounts
from llm_core.speculative.drafters.base import ComputedRows, Drafter, DraftRequest, DraftShape
from llm_core.speculative.factory import make_controller, make_drafter, speculates
from llm_core.speculative.heads.config import HeadConfig
from llm_core.speculative.heads.eagle import (
    EagleHead,
    TargetRows,
    head_shapes,
    pairs_to_halves,
    target_ids,
)
from llm_core.speculative.heads.files import (
    TENSORS_NAME,
    HeadFile,
    fingerprint,
    read_head,
    write_head,
)
from llm_core.speculative.heads.medusa import MedusaHeads

__all__ = [
    "ComputedRows",
    "Controller",
    "DraftRequest",
    "DraftShape",
    "Drafter",
    "EagleHead",
    "HeadConfig",
    "HeadFile",
    "MedusaHeads",
    "BatchState",
    "SpeculationCounts",
    "TENSORS_NAME",
    "TargetRows",
    "accept",
    "fingerprint",
    "head_shapes",
    "make_controller",
    "make_drafter",
    "pairs_to_halves",
    "read_head",
    "speculates",
    "target_ids",
    "write_head",
]
