"""Owns a decoder and its KV cache, and runs batches through them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

import torch

from kernels import BackendName, select_backend
from llm_core.batch import ForwardBatch
from llm_core.config import ModelConfig
from llm_core.decoder import Decoder
from llm_core.errors import ModelLoadError
from llm_core.kv_cache import KvCache
from llm_core.loading.gguf_model import open_gguf_model
from llm_core.quant.formats import Weight
from llm_core.quant.linear import choose_formats


class InfoFields(TypedDict):
    """The fields of ``messages.ModelInfo``, so that ``ModelInfo(**runner.info_fields)`` works."""

    name: str
    context_len: int
    vocab_size: int
    num_layers: int
    weight_format: str
    num_threads: int


class ModelRunner:
    """Runs the decoder over batches. One caller at a time.

    ``max_context`` is the number of positions a slot holds: the model's context length, or less if
    asked. Torch's thread count is a property of the process; constructing a runner sets it.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        *,
        weight_format: str = "float32",
        backend: BackendName = "cpu",
        num_threads: int = 1,
        num_slots: int = 1,
        max_context: int | None = None,
        name: str = "in-memory",
    ) -> None:
        """``weights`` as in ``decoder.weight_shapes``; ``weight_format`` as in ``quant.linear``.

        Raises ModelLoadError when the KV cache cannot fit into this machine's memory.
        """
        self.config = config
        self.num_slots = num_slots
        self.max_context = min(max_context or config.context_len, config.context_len)
        self._name = name
        self._num_threads = num_threads
        _check_cache_fits(KvCache.num_bytes(config, num_slots, self.max_context), self)
        torch.set_num_threads(num_threads)
        formats = choose_formats(weight_format)
        self._weight_format = str(formats)
        with torch.inference_mode():
            self._cache = KvCache(config, num_slots, self.max_context)
            self._decoder = Decoder(
                config, weights, formats, select_backend(backend), self.max_context
            )

    @classmethod
    def load(
        cls,
        model_path: str,
        *,
        num_threads: int,
        num_slots: int,
        max_context: int | None,
        weight_format: str = "auto",
    ) -> ModelRunner:
        """Reads a GGUF file. Raises ModelLoadError."""
        with open_gguf_model(model_path) as model:
            return cls(
                model.config,
                model.weights,
                weight_format=weight_format,
                num_threads=num_threads,
                num_slots=num_slots,
                max_context=max_context,
                name=Path(model_path).stem,
            )

    @property
    def info_fields(self) -> InfoFields:
        """What is loaded; ``context_len`` is what a slot holds."""
        return InfoFields(
            name=self._name,
            context_len=self.max_context,
            vocab_size=self.config.vocab_size,
            num_layers=self.config.num_layers,
            weight_format=self._weight_format,
            num_threads=self._num_threads,
        )

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32 logits [R, vocab_size], one row for each of ``batch.logit_rows``.

        Every segment must start at or before the end of what its slot holds; the slot then holds
        ``segment.end`` positions (anything beyond is stale and will be overwritten).
        """
        self._check(batch)
        with torch.inference_mode():
            return self._decoder.forward(batch, self._cache)

    def copy_prefix(self, src_slot: int, dst_slot: int, length: int) -> None:
        """Copies keys and values of positions [0, length) from one slot to another."""
        assert 0 <= src_slot < self.num_slots and 0 <= dst_slot < self.num_slots
        assert 0 <= length <= self.max_context
        with torch.inference_mode():
            self._cache.copy_prefix(src_slot, dst_slot, length)

    def _check(self, batch: ForwardBatch) -> None:
        slots = {segment.slot for segment in batch.segments}
        assert len(slots) == len(batch.segments) > 0, "a slot occurs twice, or the batch is empty"
        for segment in batch.segments:
            assert 0 <= segment.slot < self.num_slots, f"no slot {segment.slot}"
            assert segment.start >= 0 and segment.length > 0, f"empty {segment}"
            assert segment.end <= self.max_context, f"{segment} exceeds {self.max_context}"
        num_rows = sum(segment.length for segment in batch.segments)
        assert batch.token_ids.shape == (num_rows,), "token_ids and segments disagree"


def _check_cache_fits(num_bytes: int, runner: ModelRunner) -> None:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > memory_bytes:
        raise ModelLoadError(
            f"the KV cache of {runner.num_slots} slots with {runner.max_context} positions needs "
            f"{num_bytes / 2**30:.1f} GiB and this machine has {memory_bytes / 2**30:.1f} GiB: "
            "choose a smaller max_context or fewer sequences"
        )
