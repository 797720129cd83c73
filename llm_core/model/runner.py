"""Owns a model and its KV cache, and runs batches through them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypedDict

import torch

from kernels import BackendName
from llm_core.batch import ForwardBatch, ForwardResult, Launched
from llm_core.config import ModelConfig
from llm_core.errors import ModelLoadError
from llm_core.loading import ModelWeights, open_weights
from llm_core.messages import EngineConfig, KvChoice, ModelBackend
from llm_core.model.backend import (
    Model,
    ModelOptions,
    TokenChooser,
    make_cache,
    make_model,
    why_no_gpu,
)
from llm_core.model.gpu.decoder import TritonDecoder
from llm_core.model.gpu.kv_cache import GpuKvCache
from llm_core.model.kv_cache import KvCache
from llm_core.model.native_decoder import NativeDecoder
from llm_core.model.parallel.group import RankGroup
from llm_core.model.parallel.launch import Followers, join
from llm_core.model.parallel.steps import follow
from llm_core.quant import Weight
from llm_core.sampling import NativeSampler, TokenDrawer
from llm_core.scheduling import AttentionWindow

_BLOCK_SIZE = 16
_DEFAULT_KV_TOKENS = 2048  # of each sequence that may run


class InfoFields(TypedDict):
    """The fields of ``messages.ModelInfo``, so that ``ModelInfo(**runner.info_fields)`` works."""

    name: str
    context_len: int
    vocab_size: int
    num_layers: int
    weight_format: str
    num_threads: int


class ModelRunner:
    """Runs the model over batches. One caller at a time.

    ``max_context`` is the longest sequence: the model's context length, or less if asked, or less
    because the whole pool of ``num_blocks`` blocks holds no more. Torch's thread count is a
    property of the process; constructing a runner sets it.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        *,
        weight_format: str = "float32",
        backend: BackendName = "cpu",
        model_backend: ModelBackend = "torch",
        native_cache_dir: str | None = None,
        num_threads: int = 1,
        num_blocks: int | None = None,
        block_size: int = _BLOCK_SIZE,
        kv_dtype: KvChoice = "float32",
        max_context: int | None = None,
        max_sequences: int = 1,
        is_pool_limit: bool = True,
        group: RankGroup | None = None,
        overlap_rows: int = 0,
        torch_compile: bool = False,
        name: str = "in-memory",
    ) -> None:
        """``weights`` as in ``decoder.weight_shapes``; ``weight_format`` as in ``quant.linear``;
        ``backend`` are the kernels of torch's decoder; ``model_backend`` and ``native_cache_dir``
        as in ``EngineConfig``; ``is_pool_limit``: no sequence is longer than the whole pool (one
        that a window slides over may be); ``num_blocks`` None: enough for two sequences of the
        longest kind; ``group``, ``overlap_rows`` and ``torch_compile`` as in ``ModelOptions``.

        Raises ModelLoadError when the KV cache cannot fit into the memory that is to hold it, and
        as ``make_model`` does.
        """
        longest = min(max_context or config.context_len, config.context_len)
        self.config = config
        self.num_blocks = num_blocks or 2 * -(-longest // block_size)
        self.block_size = block_size
        self.max_context = min(longest, self.num_blocks * block_size) if is_pool_limit else longest
        self._name = name
        self._num_threads = num_threads
        self._followers: Followers | None = None  # live as long as this
        self._group = group
        if why_no_gpu(model_backend) is not None:
            dtype = "float32" if kv_dtype == "auto" else kv_dtype
            num_bytes = KvCache.num_bytes(config, self.num_blocks, block_size, dtype)
            _check_cache_fits(num_bytes, self)
        torch.set_num_threads(num_threads)
        options = ModelOptions(
            backend=model_backend,
            weight_format=weight_format,
            torch_kernels=backend,
            num_threads=num_threads,
            native_cache_dir=Path(native_cache_dir) if native_cache_dir else None,
            group=group,
            overlap_rows=overlap_rows,
            torch_compile=torch_compile,
        )
        with torch.inference_mode():
            self._model, self._weight_format = make_model(
                config, weights, options, self.max_context
            )
            self._cache = make_cache(
                self._model,
                config,
                self.num_blocks,
                block_size,
                kv_dtype,
                max_sequences=max_sequences,
            )

    @classmethod
    def load(cls, engine_config: EngineConfig, *, weight_format: str = "auto") -> ModelRunner:
        """Reads a GGUF file or a Hugging Face directory. Raises ModelLoadError."""
        with open_weights(engine_config.model_path) as model:
            return cls.of(model, engine_config, weight_format=weight_format)

    @classmethod
    def of(
        cls, model: ModelWeights, engine_config: EngineConfig, *, weight_format: str = "auto"
    ) -> ModelRunner:
        """Reads the weights of an open model; with ``tensor_parallel``, starts the other ranks,
        whose weights are of the format "auto". Raises ModelLoadError."""
        if engine_config.tensor_parallel == 1:
            return cls._of(model, engine_config, weight_format, None)
        followers = Followers(engine_config, why_no_gpu(engine_config.backend))
        try:
            group = followers.join()
            runner = cls._of(model, engine_config, "auto", group)
            followers.meet(group)
        except BaseException:
            followers.close()
            raise
        runner._followers, runner._group = followers, group
        return runner

    def attention_window(self, engine_config: EngineConfig) -> AttentionWindow | None:
        """The one that is asked for. Raises ModelLoadError where the model cannot have it."""
        recent = engine_config.attention_window
        if recent is None:
            return None
        if why_no_gpu(engine_config.backend) is None:
            raise ModelLoadError("attention_window: the GPU decoder has none; use native or torch")
        own = self.config.sliding_window if any(self.config.layer_is_sliding) else None
        if own is not None and recent < own:
            raise ModelLoadError(
                f"attention_window is {recent}, but layers of this model see {own} positions"
            )
        return AttentionWindow.of_tokens(engine_config.attention_sinks, recent, self.block_size)

    def close(self) -> None:
        """Ends the other ranks, where there are some; a process that ends does so too."""
        if self._followers is not None and self._group is not None:
            self._followers.close()
            self._group.close()

    @classmethod
    def follow(cls, engine_config: EngineConfig, folder: Path, rank: int) -> None:
        """Is rank ``rank`` of a model until rank 0 ends. Raises ModelLoadError, RuntimeError."""
        group = join(folder, rank, engine_config.tensor_parallel)
        with open_weights(engine_config.model_path) as model:
            runner = cls._of(model, engine_config, "auto", group)
        group.meet()
        assert isinstance(runner._model, TritonDecoder) and isinstance(runner._cache, GpuKvCache)
        follow(runner._model, runner._cache, group)

    @classmethod
    def _of(
        cls,
        model: ModelWeights,
        engine_config: EngineConfig,
        weight_format: str,
        group: RankGroup | None,
    ) -> ModelRunner:
        kv_tokens = _kv_cache_tokens(engine_config, model.config.context_len)
        return cls(
            model.config,
            model.weights,
            weight_format=weight_format,
            num_threads=engine_config.num_threads,
            num_blocks=-(-kv_tokens // _BLOCK_SIZE) + 1,  # one to spare for a copy
            kv_dtype=engine_config.kv_dtype,
            max_context=engine_config.max_context,
            max_sequences=engine_config.max_sequences,
            is_pool_limit=engine_config.attention_window is None,
            model_backend=engine_config.backend,
            native_cache_dir=engine_config.native_cache_dir,
            group=group,
            overlap_rows=engine_config.overlap_rows,
            torch_compile=engine_config.torch_compile,
            name=model.name,
        )

    @property
    def model(self) -> Model:
        """The model itself: a draft head may share its threads and its embedding."""
        return self._model

    @property
    def info_fields(self) -> InfoFields:
        """What is loaded; ``context_len`` is the longest sequence."""
        return InfoFields(
            name=self._name,
            context_len=self.max_context,
            vocab_size=self.config.vocab_size,
            num_layers=self.config.num_layers,
            weight_format=self._weight_format,
            num_threads=self._num_threads,
        )

    def set_feature_layers(self, layers: tuple[int, ...]) -> None:
        """See ``model_choice.Model``."""
        self._model.set_feature_layers(layers)

    def forward(self, batch: ForwardBatch) -> ForwardResult:
        """Logits of ``batch.logit_rows``, and features if wanted.

        Positions before a segment's start must have been computed into its blocks; anything that
        its blocks hold from there on is overwritten.
        """
        self._check(batch)
        with torch.inference_mode():
            return self._model.forward(batch, self._cache)

    @cached_property
    def drawer(self) -> TokenDrawer | None:
        """Who draws from rows with maxima; None: the sampler itself."""
        model = self._model
        if not isinstance(model, NativeDecoder):
            return None
        return NativeSampler(model.library, self.config.vocab_size)

    @property
    def chooses_tokens(self) -> bool:
        """Whether the model does, where it computes: then ``launch`` may be used."""
        return isinstance(self._model, TokenChooser)

    def choose_below(self, vocab_size: int) -> None:
        """See ``model_choice.TokenChooser``; only where ``chooses_tokens``."""
        assert isinstance(self._model, TokenChooser)
        with torch.inference_mode():
            self._model.choose_below(vocab_size)

    def launch(self, batch: ForwardBatch) -> Launched:
        """Begins ``forward``. See ``model_choice.TokenChooser``; only where ``chooses_tokens``."""
        assert isinstance(self._model, TokenChooser)
        self._check(batch)
        with torch.inference_mode():
            return self._model.launch(batch, self._cache)

    def copy_block_rows(self, src_block: int, dst_block: int, num_rows: int) -> None:
        """Copies keys and values of the first ``num_rows`` positions of a block to another one."""
        assert 0 <= src_block < self.num_blocks and 0 <= dst_block < self.num_blocks
        assert 0 <= num_rows <= self.block_size
        with torch.inference_mode():
            self._cache.copy_rows(src_block, dst_block, num_rows)

    def move_rows(self, block_ids: Sequence[int], start: int, rows: Sequence[int]) -> None:
        """Keeps of a tree's rows at ``start`` these, one after another. See ``KvCache``."""
        assert list(rows) == sorted(set(rows)) and all(row >= 0 for row in rows), "rows ascend"
        with torch.inference_mode():
            self._cache.move_rows(block_ids, start, rows)

    def _check(self, batch: ForwardBatch) -> None:
        written: list[int] = []
        for segment in batch.segments:
            assert segment.start >= 0 and segment.length > 0, f"empty {segment}"
            text_end = segment.end + segment.skipped
            assert text_end <= self.max_context, f"{segment} exceeds {self.max_context}"
            assert segment.end <= len(segment.block_ids) * self.block_size, (
                f"{segment} lacks blocks"
            )
            assert 0 <= min(segment.block_ids) <= max(segment.block_ids) < self.num_blocks
            if segment.parents is not None:
                assert len(segment.parents) == segment.length, "each row of a tree has a parent"
                assert all(-1 <= p < row for row, p in enumerate(segment.parents)), (
                    f"a row of a tree follows one before it: {segment.parents}"
                )
            first, last = segment.start // self.block_size, (segment.end - 1) // self.block_size
            written += segment.block_ids[first : last + 1]
        assert len(set(written)) == len(written) > 0, "a block is written twice, or nothing is"
        num_rows = sum(segment.length for segment in batch.segments)
        assert batch.token_ids.shape == (num_rows,), "token_ids and segments disagree"


def _kv_cache_tokens(engine_config: EngineConfig, context_len: int) -> int:
    if engine_config.kv_cache_tokens is not None:
        return engine_config.kv_cache_tokens
    longest = min(engine_config.max_context or context_len, context_len)
    return max(longest, engine_config.max_sequences * min(longest, _DEFAULT_KV_TOKENS))


def _check_cache_fits(num_bytes: int, runner: ModelRunner) -> None:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > memory_bytes:
        raise ModelLoadError(
            f"the KV cache of {runner.num_blocks} blocks of {runner.block_size} positions needs "
            f"{num_bytes / 2**30:.1f} GiB and this machine has {memory_bytes / 2**30:.1f} GiB: "
            "choose a smaller max_context, fewer sequences, or kv_dtype int8"
        )
