"""Owner of a model and its KV cache, which runs batches through them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypedDict

import torch

from llm_core.batch import ForwardBatch, ForwardResult, Launched
from llm_core.config import ModelConfig
from llm_core.errors import ModelLoadError
from llm_core.loading import ModelWeights, open_weights
from llm_core.messages import EngineConfig
from llm_core.model.backend import (
    DeviceSampler,
    Model,
    RunnerOptions,
    make_cache,
    make_model,
    why_no_gpu,
)
from llm_core.model.gpu.decoder import TritonDecoder
from llm_core.model.gpu.kv_cache import GpuKvCache
from llm_core.model.kv_cache import KvCache
from llm_core.model.native_decoder import NativeDecoder
from llm_core.model.parallel.launch import Followers, join
from llm_core.model.parallel.steps import follow
from llm_core.quant import Weight
from llm_core.sampling import NativeSampler, SamplerBackend
from llm_core.scheduling import AttentionWindow


class InfoFields(TypedDict):
    """The fields of ``messages.ModelInfo`` that the runner knows."""

    name: str
    context_len: int
    vocab_size: int
    num_layers: int
    weight_format: str
    num_threads: int


class ModelRunner:
    """Runs the model over batches; not thread-safe.

    ``max_context`` is the length of the longest sequence: the minimum of the model's context, the
    option, and the size of the KV pool. Constructing a runner sets torch's thread count, which is a
    property of the process.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        options: RunnerOptions | None = None,
        *,
        name: str = "in-memory",
    ) -> None:
        """``weights`` by the names of ``loading.layer_shapes``. Raises ModelLoadError if the KV
        cache does not fit into memory, and as ``make_model``."""
        options = options or RunnerOptions()
        longest = min(options.max_context or config.context_len, config.context_len)
        self.config = config
        self.block_size = options.block_size
        self.num_blocks = options.num_blocks or 2 * -(-longest // self.block_size)
        pool_len = self.num_blocks * self.block_size
        self.max_context = min(longest, pool_len) if options.is_pool_limit else longest
        self._name = name
        self._num_threads = options.num_threads
        self._followers: Followers | None = None
        self._group = options.group
        if why_no_gpu(options.backend) is not None:
            dtype = "float32" if options.kv_dtype == "auto" else options.kv_dtype
            num_bytes = KvCache.num_bytes(config, self.num_blocks, self.block_size, dtype)
            _check_cache_fits(num_bytes, self)
        torch.set_num_threads(options.num_threads)
        with torch.inference_mode():
            self._model, self._weight_format = make_model(
                config, weights, options, self.max_context
            )
            self._cache = make_cache(
                self._model,
                config,
                self.num_blocks,
                self.block_size,
                options.kv_dtype,
                max_sequences=options.max_sequences,
            )

    @classmethod
    def load(cls, engine_config: EngineConfig, *, weight_format: str = "auto") -> ModelRunner:
        """Loads a GGUF file or a Hugging Face directory. Raises ModelLoadError."""
        with open_weights(engine_config.model_path) as model:
            return cls.of(model, engine_config, weight_format=weight_format)

    @classmethod
    def of(
        cls, model: ModelWeights, engine_config: EngineConfig, *, weight_format: str = "auto"
    ) -> ModelRunner:
        """Loads the weights of an open model. With ``tensor_parallel`` it starts the other ranks,
        and all ranks have weight format "auto". Raises ModelLoadError."""
        context_len = model.config.context_len
        if engine_config.tensor_parallel == 1:
            options = RunnerOptions.of(engine_config, context_len, weight_format=weight_format)
            return cls(model.config, model.weights, options, name=model.name)
        followers = Followers(engine_config, why_no_gpu(engine_config.backend))
        try:
            group = followers.join()
            options = RunnerOptions.of(engine_config, context_len, group=group)
            runner = cls(model.config, model.weights, options, name=model.name)
            followers.wait_until_loaded(group)
        except BaseException:
            followers.close()
            raise
        runner._followers = followers  # lives as long as the runner
        return runner

    def attention_window(self, engine_config: EngineConfig) -> AttentionWindow | None:
        """The configured attention window. Raises ModelLoadError if it is not supported."""
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
        """Stops the other ranks, as the end of the process would."""
        if self._followers is not None and self._group is not None:
            self._followers.close()
            self._group.close()

    @classmethod
    def follow(cls, engine_config: EngineConfig, folder: Path, rank: int) -> None:
        """Runs as rank ``rank`` of a tensor-parallel model until rank 0 ends. Raises
        ModelLoadError, RuntimeError."""
        group = join(folder, rank, engine_config.tensor_parallel)
        with open_weights(engine_config.model_path) as model:
            options = RunnerOptions.of(engine_config, model.config.context_len, group=group)
            runner = cls(model.config, model.weights, options, name=model.name)
        group.barrier()
        assert isinstance(runner._model, TritonDecoder) and isinstance(runner._cache, GpuKvCache)
        follow(runner._model, runner._cache, group)

    @property
    def model(self) -> Model:
        """The decoder, whose threads and embedding a draft head may share."""
        return self._model

    @property
    def info_fields(self) -> InfoFields:
        """Description of the loaded model; ``context_len`` is ``max_context``."""
        return InfoFields(
            name=self._name,
            context_len=self.max_context,
            vocab_size=self.config.vocab_size,
            num_layers=self.config.num_layers,
            weight_format=self._weight_format,
            num_threads=self._num_threads,
        )

    def set_feature_layers(self, layers: tuple[int, ...]) -> None:
        """See ``backend.Model``."""
        self._model.set_feature_layers(layers)

    def forward(self, batch: ForwardBatch) -> ForwardResult:
        """Logits of ``batch.logit_rows``, and features if wanted.

        Positions before a segment's start must already be in its blocks; later ones are
        overwritten.
        """
        self._check(batch)
        with torch.inference_mode():
            return self._model.forward(batch, self._cache)

    @cached_property
    def sampler_backend(self) -> SamplerBackend | None:
        """The sampler for rows with block maxima; None: ``sampling.sample_row``."""
        model = self._model
        if not isinstance(model, NativeDecoder):
            return None
        return NativeSampler(model.library, self.config.vocab_size)

    @property
    def samples_on_device(self) -> bool:
        """Is the model a ``DeviceSampler``? Only then may ``launch`` be used."""
        return isinstance(self._model, DeviceSampler)

    def set_vocab_size(self, vocab_size: int) -> None:
        """See ``DeviceSampler``; requires ``samples_on_device``."""
        assert isinstance(self._model, DeviceSampler)
        with torch.inference_mode():
            self._model.set_vocab_size(vocab_size)

    def launch(self, batch: ForwardBatch) -> Launched:
        """Starts ``forward``, see ``DeviceSampler``; requires ``samples_on_device``."""
        assert isinstance(self._model, DeviceSampler)
        self._check(batch)
        with torch.inference_mode():
            return self._model.launch(batch, self._cache)

    def copy_block_rows(self, src_block: int, dst_block: int, num_rows: int) -> None:
        """Copies keys and values of the first ``num_rows`` positions of a block to another."""
        assert 0 <= src_block < self.num_blocks and 0 <= dst_block < self.num_blocks
        assert 0 <= num_rows <= self.block_size
        with torch.inference_mode():
            self._cache.copy_rows(src_block, dst_block, num_rows)

    def move_rows(self, block_ids: Sequence[int], start: int, rows: Sequence[int]) -> None:
        """Compacts the accepted ``rows`` of a tree at ``start``, see ``KvCache.move_rows``."""
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


def _check_cache_fits(num_bytes: int, runner: ModelRunner) -> None:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > memory_bytes:
        raise ModelLoadError(
            f"the KV cache of {runner.num_blocks} blocks of {runner.block_size} positions needs "
            f"{num_bytes / 2**30:.1f} GiB and this machine has {memory_bytes / 2**30:.1f} GiB: "
            "choose a smaller max_context, fewer sequences, or kv_dtype int8"
        )
