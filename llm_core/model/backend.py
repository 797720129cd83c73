"""Selection of the decoder implementation for a model; logged in one line."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from kernels import BackendName, select_backend
from kernels.gpu import is_interpreted, load_ops, measuring, unavailable_reason
from kernels.native import Library, NativeUnavailableError, load
from llm_core.batch import ForwardBatch, ForwardResult, Launched
from llm_core.config import ModelConfig
from llm_core.errors import ModelLoadError
from llm_core.messages import EngineConfig, KvChoice, ModelBackend
from llm_core.model.gpu.decoder import TritonDecoder
from llm_core.model.gpu.graphs import CudaCapture
from llm_core.model.gpu.kv_cache import GpuKvCache
from llm_core.model.gpu.torch_parts import TorchParts
from llm_core.model.gpu.weights import FORMATS, check_format, compute_dtype
from llm_core.model.kv_cache import KvCache
from llm_core.model.native_decoder import NativeDecoder, unsupported_reason
from llm_core.model.parallel.group import RankGroup
from llm_core.model.parallel.shards import ShardedWeights, shard_config
from llm_core.model.parallel.steps import LeadModel
from llm_core.model.torch_decoder import TorchDecoder
from llm_core.quant import Weight, choose_formats

logger = logging.getLogger("llm_core.model.backend")

BLOCK_SIZE = 16  # positions of a KV block
_DEFAULT_KV_TOKENS = 2048  # per concurrent sequence
_FLOAT8_CAPABILITY = (8, 9)  # Ada: the first that Triton converts e4m3 for


class Model(Protocol):
    """A decoder. All implementations compute the same as ``TorchDecoder``."""

    def forward(self, batch: ForwardBatch, cache: KvCache) -> ForwardResult:
        """Logits of ``batch.logit_rows``, and features if wanted. Writes the keys and values of all
        rows into ``cache``. Called under inference mode."""

    def set_feature_layers(self, layers: tuple[int, ...]) -> None:
        """Sets the hidden states that are returned as features: i is the residual stream after
        layer i, num_layers the output of the final norm. Called once, before a batch wants
        features."""


@runtime_checkable
class DeviceSampler(Model, Protocol):
    """A model that can sample tokens on the device and runs asynchronously."""

    def launch(self, batch: ForwardBatch, cache: KvCache) -> Launched:
        """Starts ``forward``, sampling tokens if ``batch.choices`` is set. The next step may be
        launched, and blocks may be copied, before the result is awaited."""

    def set_vocab_size(self, vocab_size: int) -> None:
        """Excludes token ids from ``vocab_size`` on (padding) from sampling. No step may be in
        flight."""


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Options of a model runner. The defaults suit tests; ``of`` derives the options of an engine.

    ``weight_format``: see ``quant.choose_formats``. ``torch_kernels``: operations of the torch
    decoder. ``native_cache_dir``: directory of the compiled library (None: the user's cache).
    ``num_blocks``: size of the KV pool (None: two sequences of the maximum length).
    ``max_sequences``: batch size for which decode steps are prepared. ``max_context``: longest
    sequence (None: the model's). ``is_pool_limit``: a sequence may not exceed the whole pool; False
    with an attention window, which evicts blocks. ``group``: the ranks of a tensor-parallel model.
    ``overlap_rows``: see ``TritonDecoder``. ``torch_compile``: compile the torch parts of a GPU
    step.
    """

    backend: ModelBackend = "torch"
    weight_format: str = "float32"
    torch_kernels: BackendName = "cpu"
    num_threads: int = 1
    native_cache_dir: Path | None = None
    num_blocks: int | None = None
    block_size: int = BLOCK_SIZE
    kv_dtype: KvChoice = "float32"
    max_context: int | None = None
    max_sequences: int = 1
    is_pool_limit: bool = True
    group: RankGroup | None = None
    overlap_rows: int = 0
    torch_compile: bool = False

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        context_len: int,
        *,
        weight_format: str = "auto",
        group: RankGroup | None = None,
    ) -> RunnerOptions:
        """The options of an engine whose model has a context of ``context_len`` tokens."""
        cache_dir = config.native_cache_dir
        num_tokens = _kv_cache_tokens(config, context_len)
        return cls(
            backend=config.backend,
            weight_format=weight_format,
            num_threads=config.num_threads,
            native_cache_dir=Path(cache_dir) if cache_dir else None,
            num_blocks=-(-num_tokens // BLOCK_SIZE) + 1,  # a spare one for copies
            kv_dtype=config.kv_dtype,
            max_context=config.max_context,
            max_sequences=config.max_sequences,
            is_pool_limit=config.attention_window is None,
            group=group,
            overlap_rows=config.overlap_rows,
            torch_compile=config.torch_compile,
        )


def _kv_cache_tokens(config: EngineConfig, context_len: int) -> int:
    if config.kv_cache_tokens is not None:
        return config.kv_cache_tokens
    longest = min(config.max_context or context_len, context_len)
    return max(longest, config.max_sequences * min(longest, _DEFAULT_KV_TOKENS))


def make_model(
    config: ModelConfig, weights: Mapping[str, Weight], options: RunnerOptions, max_context: int
) -> tuple[Model, str]:
    """The model, and the format of its weights.

    Backend ``auto`` selects a GPU if there is one; else compiled code if it can be built for this
    CPU, supports the model, and no weight format is requested; else torch. Raises ModelLoadError if
    a requested backend is not available, or the weights cannot be used.
    """
    no_gpu = why_no_gpu(options.backend)
    if no_gpu is None and options.backend == "auto" and options.weight_format not in FORMATS:
        no_gpu = f"weight format {options.weight_format} is the CPU's"
    if no_gpu is None:
        return _make_triton(config, weights, options, max_context)
    if options.group is not None:
        raise ModelLoadError(f"tensor_parallel shares a model between GPUs, but {no_gpu}")
    library: Library | None = None
    if options.backend != "torch":
        try:
            library = _native_library(config, options)
        except NativeUnavailableError as error:
            if options.backend == "native":
                remedy = f"; {error.remedy}" if error.remedy else ""
                raise ModelLoadError(f"the compiled decoder cannot run: {error}{remedy}") from error
            if error.remedy:
                logger.warning(
                    "the model runs on torch, which may take several times as long as compiled "
                    "code: %s; %s; %s",
                    *(error, error.remedy, no_gpu),
                )
            else:  # torch was requested, or nothing can be done about it
                logger.info("the model runs on torch: %s; %s", error, no_gpu)
    if library is None:
        formats = choose_formats(options.weight_format)
        kernels = select_backend(options.torch_kernels)
        return TorchDecoder(config, weights, formats, kernels, max_context), str(formats)
    try:
        decoder = NativeDecoder(
            config, weights, library, num_threads=options.num_threads, max_context=max_context
        )
    except (ValueError, MemoryError, NativeUnavailableError) as error:
        raise ModelLoadError(f"the weights cannot be packed: {error}") from error
    torch.set_num_threads(1)  # the remaining torch operations are too small to parallelise
    logger.info("the model runs in compiled code (%s); %s", library.instructions, no_gpu)
    return decoder, decoder.weight_format


def why_no_gpu(backend: ModelBackend) -> str | None:
    """The reason why a model with this setting does not run on a GPU; None if it does.

    Raises ModelLoadError if a GPU is required but not available. ``auto`` never selects Triton's
    interpreter, which takes a second per token.
    """
    if backend not in ("auto", "triton"):
        return f"backend {backend} is asked for"
    reason = unavailable_reason()
    if reason is None and backend == "auto" and is_interpreted():
        return "Triton is interpreted (TRITON_INTERPRET is set)"
    if reason is None or backend == "auto":
        return reason
    raise ModelLoadError(f"the Triton kernels cannot run: {reason}")


def make_cache(
    model: Model,
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    dtype: KvChoice,
    *,
    max_sequences: int = 1,
) -> KvCache:
    """The KV pool of ``model`` on its device; also warms up steps of up to ``max_sequences``
    sequences. Raises ModelLoadError for a dtype that the model does not support, or a pool that
    does not fit into the GPU's memory."""
    decoder = model.decoder if isinstance(model, LeadModel) else model
    if not isinstance(decoder, TritonDecoder):
        if dtype == "fp8":
            raise ModelLoadError("kv_dtype is fp8, which only the Triton kernels have; use int8")
        if dtype == "auto":
            # Compiled attention is bound by bandwidth, and 8-bit activations round more than this.
            dtype = "bfloat16" if isinstance(decoder, NativeDecoder) else "float32"
        return KvCache(config, num_blocks, block_size, dtype)
    is_cuda = decoder.device.type == "cuda"
    if dtype == "auto":
        dtype = "bfloat16" if is_cuda else "float32"
    try:
        check_float8("keys and values", dtype, is_cuda=is_cuda)
    except ValueError as error:
        raise ModelLoadError(f"kv_dtype: {error}") from error
    cache = GpuKvCache(
        decoder.config, num_blocks, block_size, dtype, device=decoder.device, ops=decoder.ops
    )
    with measuring():
        decoder.warm_up(cache, max_sequences)
    if isinstance(model, LeadModel):
        model.attach(cache)
    return cache


def _make_triton(
    config: ModelConfig, weights: Mapping[str, Weight], options: RunnerOptions, max_context: int
) -> tuple[Model, str]:
    is_cuda = not is_interpreted()
    group = options.group
    try:
        weight_format = check_format(options.weight_format)
        ops = load_ops("triton")
        device = _device(is_cuda=is_cuda)
        parts = TorchParts(device if options.torch_compile else None)
        check_float8("weights", weight_format, is_cuda=is_cuda)
    except (ValueError, ImportError) as error:
        raise ModelLoadError(f"the Triton kernels cannot run the model: {error}") from error
    if group is not None:
        weights = ShardedWeights(weights, config, rank=group.rank, num_ranks=group.num_ranks)
        config = shard_config(config, group.num_ranks)
    try:
        decoder = TritonDecoder(
            config,
            weights,
            ops,
            device=device,
            dtype=compute_dtype(weight_format, is_cuda=is_cuda),
            max_context=max_context,
            weight_format=weight_format,
            capture=CudaCapture() if is_cuda else None,
            collectives=group,
            overlap_rows=options.overlap_rows,
            parts=parts,
        )
    except torch.OutOfMemoryError as error:
        raise ModelLoadError(f"the GPU's memory does not hold the weights: {error}") from error
    where = torch.cuda.get_device_name(device) if is_cuda else "Triton's interpreter"
    logger.info("the model runs on %s (%s)", where, decoder.weight_format)
    model = LeadModel(decoder, group) if group is not None and group.rank == 0 else decoder
    return model, decoder.weight_format


def _device(*, is_cuda: bool) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")


def check_float8(what: str, form: str, *, is_cuda: bool) -> None:
    """Raises ValueError if ``what`` is to be stored in FP8 and the GPU does not support it."""
    if form != "fp8" or not is_cuda:
        return
    capability = torch.cuda.get_device_capability()
    if capability < _FLOAT8_CAPABILITY:
        raise ValueError(
            f"{what} are to be fp8, which compute capability {capability[0]}.{capability[1]} does "
            f"not have: expected {_FLOAT8_CAPABILITY[0]}.{_FLOAT8_CAPABILITY[1]} or higher, or int8"
        )


def default_native_cache_dir() -> Path:
    """Under XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "parley" / "native"


def _native_library(config: ModelConfig, options: RunnerOptions) -> Library:
    """The compiled library. Raises NativeUnavailableError if torch has to be used instead."""
    if options.weight_format != "auto":
        raise NativeUnavailableError(f"weight format {options.weight_format} is torch's")
    reason = unsupported_reason(config)
    if reason is not None:
        raise NativeUnavailableError(reason)
    library = load(options.native_cache_dir or default_native_cache_dir())
    if options.backend == "auto" and not library.has_vector_products:
        raise NativeUnavailableError(f"{library.instructions} is slower than torch on this CPU")
    return library
