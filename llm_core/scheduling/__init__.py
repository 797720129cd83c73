"""The scheduler, its sequences, and the blocks of the paged KV cache. No tensors here."""

from llm_core.scheduling.attention_window import GONE, AttentionWindow
from llm_core.scheduling.block_tables import BlockCopy, BlockTables
from llm_core.scheduling.draft_tree import EMPTY, DraftTree
from llm_core.scheduling.policy import COMFORT_NS, make_policy
from llm_core.scheduling.scheduler import Chunk, Scheduler, StepPlan
from llm_core.scheduling.sequence import TokenSequence, common_prefix_len
from llm_core.scheduling.token_budget import LARGEST_CHUNK, TokenBudget

__all__ = [
    "AttentionWindow",
    "BlockCopy",
    "BlockTables",
    "COMFORT_NS",
    "Chunk",
    "DraftTree",
    "EMPTY",
    "GONE",
    "LARGEST_CHUNK",
    "TokenBudget",
    "Scheduler",
    "StepPlan",
    "TokenSequence",
    "common_prefix_len",
    "make_policy",
]
