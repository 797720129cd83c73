"""Sampling of tokens, log-probabilities, and validation of sampling parameters."""

from kernels.philox import uniform
from llm_core.sampling.logprobs import LogprobTrack
from llm_core.sampling.native_sampler import NativeSampler
from llm_core.sampling.sampler import (
    BoolRow,
    ChunkRow,
    FloatRow,
    IdRow,
    SamplerBackend,
    SamplerState,
    candidates,
    sample_row,
)
from llm_core.sampling.validation import validate_params

__all__ = [
    "BoolRow",
    "ChunkRow",
    "FloatRow",
    "IdRow",
    "LogprobTrack",
    "NativeSampler",
    "SamplerBackend",
    "SamplerState",
    "candidates",
    "sample_row",
    "uniform",
    "validate_params",
]
