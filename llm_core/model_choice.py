"""Which implementation of the decoder runs a model, chosen once and said in one line of the log."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from kernels import BackendName, select_backend
from kernels.native import Library, NativeUnavailableError, load
from llm_core.batch import ForwardBatch, ForwardResult
from llm_core.config import ModelConfig
from llm_core.decoder import Decoder
from llm_core.errors import ModelLoadError
from llm_core.kv_cache import KvCache
from llm_core.messages import ModelBackend
from llm_core.native_decoder import NativeDecoder, unsupported_reason
from llm_core.quant.formats import Weight
from llm_core.quant.linear import choose_formats

logger = logging.getLogger("llm_core.model_choice")


class Model(Protocol):
    """What computes a step: ``Decoder``, or another one with the same mathematics."""

    def forward(self, batch: ForwardBatch, cache: KvCache) -> ForwardResult:
        """Logits of ``batch.logit_rows``, and features if wanted; writes the rows' keys and values
        into ``cache``. Called under inference mode."""

    def set_feature_layers(self, layers: tuple[int, ...]) -> None:
        """Which hidden states are features: i is the residual stream after layer i, num_layers
        what the final norm makes of the last. Set once, before the first batch that wants them."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How to run a model. ``torch_kernels`` are the operations of the torch decoder;
    ``native_cache_dir`` is where the compiled library is kept (None: the user's cache)."""

    backend: ModelBackend = "torch"
    weight_format: str = "float32"
    torch_kernels: BackendName = "cpu"
    num_threads: int = 1
    native_cache_dir: Path | None = None


def make_model(
    config: ModelConfig, weights: Mapping[str, Weight], options: ModelOptions, max_context: int
) -> tuple[Model, str]:
    """The model, and what its weights are kept as.

    ``auto`` takes compiled code where it can be built for this CPU, supports the model, and no
    weight format is asked for; else torch. Raises ModelLoadError where ``native`` is asked for and
    cannot be had, or the weights cannot be used.
    """
    library: Library | None = None
    if options.backend != "torch":
        try:
            library = _native_library(config, options)
        except NativeUnavailableError as error:
            if options.backend == "native":
                raise ModelLoadError(f"the compiled decoder cannot run: {error}") from error
            logger.info("the model runs on torch: %s", error)
    if library is None:
        formats = choose_formats(options.weight_format)
        kernels = select_backend(options.torch_kernels)
        return Decoder(config, weights, formats, kernels, max_context), str(formats)
    try:
        decoder = NativeDecoder(
            config, weights, library, num_threads=options.num_threads, max_context=max_context
        )
    except (ValueError, MemoryError, NativeUnavailableError) as error:
        raise ModelLoadError(f"the weights cannot be packed: {error}") from error
    torch.set_num_threads(1)  # what is left to torch is too small to be shared out
    logger.info("the model runs in compiled code (%s)", library.instructions)
    return decoder, decoder.weight_format


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
