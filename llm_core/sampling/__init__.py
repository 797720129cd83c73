"""TODO llm_core/sampling."""

from llm_core.sampling.logprobs import LogprobTrack
from llm_core.sampling.native_sampler import NativeSampler
from llm_core.sampling.sampler import (
    BoolRow,
    ChunkRow,
    FloatRow,
    IdRow,
    SamplerState,
    TokenDrawer,
    candidates,
    sample_row,
    uniform,
)
from llm_core.sampling.validation import validate_params

__all__ = [
    "BoolRow",
    "ChunkRow",
    "FloatRow",
    "IdRow",
    "LogprobTrack",
    "NativeSampler",
    "SamplerState",
    "TokenDrawer",
    "candidates",
    "sample_row",
    "uniform",
    "validate_params",
]
