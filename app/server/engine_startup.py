"""Starts the engine of a server, one that is rolled out, and one for when time is short."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

from app.config import Settings
from app.conversation import SessionConfig, ToolBox
from app.engine_options import engine_config, parse_options
from app.errors import ConfigError
from app.routing import FILE_NAME, Rollout, Withdrawals
from llm_core import ChatMessage, EngineClient, EngineConfig, InvalidRequestError, content_hash

logger = logging.getLogger(__name__)

PathOf = Callable[[str], Awaitable[Path]]
"""The file of a model, fetched if need be."""


async def load_engine(
    settings: Settings, tools: ToolBox, path_of: PathOf, stack: AsyncExitStack
) -> EngineClient:
    """The server's own. Raises ModelLoadError; ConfigError when it is not the model it must be."""
    path = await path_of(settings.llm_model)
    await _check_content(path, settings.llm_sha256, "PARLEY_LLM_SHA256")
    return await _start(settings, engine_config(settings, path), tools, stack)


async def load_rollout(
    settings: Settings,
    stable: EngineClient,
    tools: ToolBox,
    path_of: PathOf,
    stack: AsyncExitStack,
) -> Rollout | None:
    """The second engine, when there is one and it has not been withdrawn before.

    Raises as ``load_engine``.
    """
    if not settings.canary:
        return None
    model, options = parse_options(settings.canary)
    path = await path_of(model or settings.llm_model)
    await _check_content(path, settings.canary_sha256, "PARLEY_CANARY_SHA256")
    withdrawals = Withdrawals(settings.home / FILE_NAME)
    content = await asyncio.to_thread(content_hash, path)
    key = ",".join([content, *(f"{name}={value}" for name, value in sorted(options.items()))])
    if reason := withdrawals.reason(key):
        logger.warning("the new engine was withdrawn before and is not tried again: %s", reason)
        return None
    # No process in reserve for it: the old engine is its reserve.
    config = engine_config(settings, path, {"standby": "false", **options})
    canary = await _start(settings, config, tools, stack)
    rollout = Rollout(
        stable,
        canary,
        settings.canary_share,
        key=key,
        withdrawals=withdrawals,
        patience_s=settings.canary_patience_ms / 1000,
    )
    stack.push_async_callback(rollout.close)
    return rollout


async def load_small_engine(
    settings: Settings, tools: ToolBox, path_of: PathOf, stack: AsyncExitStack
) -> EngineClient | None:
    """The engine of the policy ``smaller_model``, when it is on. Raises ModelLoadError, ConfigError
    when only one of the policy and its model is there."""
    if bool(settings.budget_small_model) != ("smaller_model" in settings.budget_policies):
        raise ConfigError(
            "the policy smaller_model in PARLEY_BUDGET_POLICIES and its model in "
            "PARLEY_BUDGET_SMALL_MODEL are needed together, and one is missing"
        )
    if not settings.budget_small_model:
        return None
    model, options = parse_options(settings.budget_small_model)
    path = await path_of(model or settings.llm_model)
    config = engine_config(settings, path, {"standby": "false", **options})
    return await _start(settings, config, tools, stack)


async def _check_content(path: Path, expected: str, name: str) -> None:
    """Raises ConfigError when a model is pinned and this is another one."""
    if not expected:
        return
    found = await asyncio.to_thread(content_hash, path)
    if not found.removeprefix("sha256:").startswith(expected.removeprefix("sha256:").lower()):
        raise ConfigError(f"{name} asks for {expected}, but {path} has {found}")


async def _start(
    settings: Settings, config: EngineConfig, tools: ToolBox, stack: AsyncExitStack
) -> EngineClient:
    engine = await EngineClient.start(config)
    stack.push_async_callback(engine.close)
    await _keep_instructions(engine, settings.instructions, tools)
    return engine


async def _keep_instructions(engine: EngineClient, instructions: str, tools: ToolBox) -> None:
    """Callers find the instructions read, however many others the cache has seen, also when the
    engine has been replaced; and no first caller pays for first-time work."""
    specs = tools.specs(SessionConfig(instructions))
    if not instructions and not specs:
        return
    try:
        await engine.pin([ChatMessage("system", instructions, tools=specs)])
    except InvalidRequestError as error:
        # Templates may begin with what the user says; and very long ones are not worth the room.
        logger.warning("the instructions are not kept in the cache for good: %s", error)
