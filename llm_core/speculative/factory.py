"""Builds the drafter and the controller that an ``EngineConfig`` asks for."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from llm_core.errors import ModelLoadError
from llm_core.loading import OpenModel, open_model
from llm_core.messages import EngineConfig
from llm_core.model import ModelRunner, NativeDecoder
from llm_core.speculative.control.auto import AutoController
from llm_core.speculative.control.base import Controller, FixedController
from llm_core.speculative.control.costs import (
    DraftCost,
    VerificationCost,
    measure_draft_ns,
    measure_forward_ns,
)
from llm_core.speculative.drafters.base import Drafter, DraftShape
from llm_core.speculative.drafters.draft_model import DraftModelDrafter
from llm_core.speculative.drafters.eagle import EagleDrafter
from llm_core.speculative.drafters.medusa import MedusaDrafter
from llm_core.speculative.drafters.ngram import NgramDrafter
from llm_core.speculative.heads.base import DraftHead
from llm_core.speculative.heads.eagle import EagleHead, TargetEmbeddings
from llm_core.speculative.heads.files import (
    HeadFile,
    bundled_head,
    fingerprint,
    is_head_directory,
    read_head,
)
from llm_core.speculative.heads.medusa import MedusaHeads
from llm_core.speculative.heads.native_eagle import NativeEagleHead, unsupported_head_reason

_AUTO_SIBLINGS = 2  # at each depth of a chain: they cost verification, but no time of the head

logger = logging.getLogger("llm_core.speculation")


def is_speculation_enabled(config: EngineConfig, runner: ModelRunner) -> bool:
    """True if ``EngineConfig.speculation`` asks for drafts, or "auto" allows them here."""
    if config.speculation != "auto":
        return config.speculation != "off"
    if config.attention_window is not None:
        logger.info("speculation is off: it does not work with an attention window")
        return False
    if not isinstance(runner.model, NativeDecoder):
        logger.info("speculation is off: automatic only with the native CPU backend")
        return False
    return True


def make_drafter(config: EngineConfig, runner: ModelRunner, opened: OpenModel) -> Drafter | None:
    """The drafter that ``EngineConfig.speculation`` names. None where "auto" has no head for this
    model; then only tokens that a grammar forces are drafted.

    Raises ModelLoadError for a head or model that does not fit; with ``speculation_optional`` logs
    a warning and returns None instead.
    """
    try:
        return _make_drafter(config, runner, opened)
    except ModelLoadError as error:
        if not config.speculation_optional:
            raise
        logger.warning("speculation is off: %s", error)
        return None


def _make_drafter(config: EngineConfig, runner: ModelRunner, opened: OpenModel) -> Drafter | None:
    speculation = config.speculation
    if speculation == "ngram":
        return NgramDrafter()
    model_fingerprint = fingerprint(runner.config, opened.model.weights)
    path = bundled_head(model_fingerprint) if speculation == "auto" else Path(speculation)
    if path is None:
        logger.info("speculation is off: no draft head is bundled for this model")
        return None
    if not path.exists():
        raise ModelLoadError(f"speculation: {path} does not exist")
    if not is_head_directory(path):
        return _draft_model(path, config, opened)
    head = read_head(path, runner.config, model_fingerprint)
    logger.info("speculation: %s head %s", head.config.kind, path.name)
    if head.config.kind == "medusa":
        target = TargetEmbeddings.of(runner.config, opened.model.weights)
        return MedusaDrafter(MedusaHeads(head.config, head.tensors, target))
    return EagleDrafter(
        _eagle_head(head, runner, opened),
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        max_sequences=config.max_sequences,
        name=head.config.kind,
    )


def make_controller(
    config: EngineConfig, runner: ModelRunner, drafter: Drafter | None
) -> Controller:
    """The controller for ``drafter``. An automatic one is given costs that are measured here, so
    the KV cache must still be empty."""
    shape = DraftShape(
        max_drafts=config.draft_tokens, max_depth=config.draft_depth, width=config.draft_width
    )
    if config.draft_control == "fixed":
        return FixedController(shape)
    shape = replace(shape, siblings=_AUTO_SIBLINGS)
    draft_ns = {1: 1.0} if drafter is None else measure_draft_ns(drafter, runner)
    return AutoController(shape, VerificationCost(measure_forward_ns(runner)), DraftCost(draft_ns))


def _eagle_head(head: HeadFile, runner: ModelRunner, opened: OpenModel) -> DraftHead:
    """Compiled where the target is compiled and the head is supported, else in PyTorch."""
    model = runner.model
    if isinstance(model, NativeDecoder) and unsupported_head_reason(head.config) is None:
        try:
            return NativeEagleHead(head.config, head.tensors, model, max_context=runner.max_context)
        except (ValueError, MemoryError) as error:
            raise ModelLoadError(f"the draft head cannot be packed: {error}") from error
    target = TargetEmbeddings.of(runner.config, opened.model.weights)
    return EagleHead(head.config, head.tensors, target, max_context=runner.max_context)


def _draft_model(path: Path, config: EngineConfig, opened: OpenModel) -> Drafter:
    """A drafter with a smaller model, which must have the target's tokens."""
    draft_config = EngineConfig(
        model_path=str(path),
        num_threads=config.num_threads,
        max_sequences=config.max_sequences,
        max_context=config.max_context,
        kv_cache_tokens=config.kv_cache_tokens,
        kv_dtype=config.kv_dtype,
        backend=config.backend,
        native_cache_dir=config.native_cache_dir,
    )
    with open_model(path) as draft:
        if draft.tokenizer.token_bytes != opened.tokenizer.token_bytes:
            raise ModelLoadError(
                f"{path.name}: the draft model's {draft.tokenizer.vocab_size} tokens are not the "
                f"model's {opened.tokenizer.vocab_size}: a draft model shares the vocabulary"
            )
        runner = ModelRunner.of(draft.model, draft_config)
    logger.info("speculation: draft model %s", path.name)
    return DraftModelDrafter(runner, vocab_size=opened.tokenizer.vocab_size)
