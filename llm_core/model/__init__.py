"""Decoder implementations, the KV cache, and the runner that owns both."""

from llm_core.model.kv_cache import KvCache
from llm_core.model.native_decoder import (
    NativeDecoder,
    SegmentArrays,
    cache_struct,
    raise_if_failed,
    unsupported_reason,
)
from llm_core.model.rope import RopeTables, rope_tables
from llm_core.model.runner import ModelRunner

__all__ = [
    "KvCache",
    "ModelRunner",
    "NativeDecoder",
    "RopeTables",
    "SegmentArrays",
    "cache_struct",
    "raise_if_failed",
    "rope_tables",
    "unsupported_reason",
]
