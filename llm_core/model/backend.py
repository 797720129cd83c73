"""Which implementation of the decoder runs a model, chosen once and said in one line of the log."""

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
from llm_core.messages import KvChoice, ModelBackend
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

_FLOAT8_CAPABILITY = (8, 9)  # Ada: Triton converts e4m3 from there on


class Model(Protocol):
    """What computes a step: ``TorchDecoder``, or another one with the same mathematics."""

    def forward(self, batch: ForwardBatch, cache: KvCache) -> ForwardResult:
        """Logits of ``batch.logit_rows``, and features if wanted; writes the rows' keys and values
        into ``cache``. Called under inference mode."""

    def set_feature_layers(self, layers: tuple[int, ...]) -> None:
        """Which hidden states are features: i is the residual stream after layer i, num_layers
        what the final norm makes of the last. Set once, before the first batch that wants them."""


@runtime_checkable
class TokenChooser(Model, Protocol):
    """A model that chooses tokens where it computes, and does not make the host wait."""

    def launch(self, batch: ForwardBatch, cache: KvCache) -> Launched:
        """Begins ``forward``; tokens are chosen as ``batch.choices`` says, if it does. The next
        step may be launched, and blocks be copied, before this one's result is asked for."""

    def choose_below(self, vocab_size: int) -> None:
        """Words from ``vocab_size`` on are padding and never chosen. Nothing is in flight."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How to run a model. ``torch_kernels`` are the operations of the torch decoder;
    ``native_cache_dir`` is where the compiled library is kept (None: the user's cache); ``group``
    are the ranks that share the model, where there are several; ``overlap_rows`` as in
    ``TritonDecoder``; ``torch_compile``: what a GPU step leaves to torch is compiled."""

    backend: ModelBackend = "torch"
    weight_format: str = "float32"
    torch_kernels: BackendName = "cpu"
    num_threads: int = 1
    native_cache_dir: Path | None = None
    group: RankGroup | None = None
    overlap_rows: int = 0
    torch_compile: bool = False


def make_model(
    config: ModelConfig, weights: Mapping[str, Weight], options: ModelOptions, max_context: int
) -> tuple[Model, str]:
    """The model, and what its weights are kept as.

    ``auto`` takes a GPU where there is one; else compiled code where it can be built for this CPU,
    supports the model, and no weight format is asked for; else torch. Raises ModelLoadError where
    ``triton`` or ``native`` is asked for and cannot be had, or the weights cannot be used.
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
            else:  # it was asked for, or is the best there is
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
    torch.set_num_threads(1)  # what is left to torch is too small to be shared out
    logger.info("the model runs in compiled code (%s); %s", library.instructions, no_gpu)
    return decoder, decoder.weight_format


def why_no_gpu(backend: ModelBackend) -> str | None:
    """Why a model with this setting does not run on a GPU; None if it does.

    Raises ModelLoadError where it must and cannot. Triton's interpreter is never chosen by itself:
    it takes a second a token.
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
    """The KV pool that ``model`` computes on, where it computes; steps of up to ``max_sequences``
    sequences are then ready to run. Raises ModelLoadError for a dtype that it cannot use, or a pool
    that does not fit into a GPU's memory."""
    decoder = model.decoder if isinstance(model, LeadModel) else model
    if not isinstance(decoder, TritonDecoder):
        if dtype == "fp8":
            raise ModelLoadError("kv_dtype is fp8, which only the Triton kernels have; use int8")
        if dtype == "auto":
            # Compiled attention is bound by the bytes it reads, and rounds more elsewhere.
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
    config: ModelConfig, weights: Mapping[str, Weight], options: ModelOptions, max_context: int
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
    """Raises ValueError where ``what`` is to be kept as 8-bit floats and the card has none."""
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


def _native_library(config: ModelConfig, options: ModelOptions) -> Library:
    """Raises NativeUnavailableError with the reason why torch is to be taken."""
    if options.weight_format != "auto":
        raise NativeUnavailableError(f"weight format {options.weight_format} is torch's")
    reason = unsupported_reason(config)
    if reason is not None:
        raise NativeUnavailableError(reason)
    library = load(options.native_cache_dir or default_native_cache_dir())
    if options.backend == "auto" and not library.has_vector_products:
        raise NativeUnavailableError(f"{library.instructions} is slower than torch on this CPU")
    return library
