"""Speculative decoding: drafters propose token trees, the target verifies them in one forward pass.

A drafter proposes a tree for each sequence (``drafters``, ``heads``), a controller decides whether
and how much (``control``), the target computes all trees of a batch together with the prompt
chunks, and ``accepted_path`` keeps the drafts that the target samples itself. The output is that of
plain decoding, token by token (Leviathan et al. 2022, arXiv 2211.17192, simplified by random
numbers that depend on a token's position alone).
"""

from llm_core.speculative.accept import accepted_path
from llm_core.speculative.control.base import BatchState, Controller
from llm_core.speculative.counts import SpeculationCounts
from llm_core.speculative.drafters.base import ComputedTokens, Drafter, DraftRequest, DraftShape
from llm_core.speculative.factory import is_speculation_enabled, make_controller, make_drafter
from llm_core.speculative.heads.config import HeadConfig
from llm_core.speculative.heads.eagle import (
    EagleHead,
    TargetEmbeddings,
    head_shapes,
    normalized_features,
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
    "TENSORS_NAME",
    "BatchState",
    "ComputedTokens",
    "Controller",
    "DraftRequest",
    "DraftShape",
    "Drafter",
    "EagleHead",
    "HeadConfig",
    "HeadFile",
    "MedusaHeads",
    "SpeculationCounts",
    "TargetEmbeddings",
    "accepted_path",
    "fingerprint",
    "head_shapes",
    "is_speculation_enabled",
    "make_controller",
    "make_drafter",
    "normalized_features",
    "pairs_to_halves",
    "read_head",
    "target_ids",
    "write_head",
]
