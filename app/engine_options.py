"""How an engine is started, as words: ``MODEL,name=value,...``.

A server's own engine follows its settings; what a second engine (a roll-out, one side of a
comparison) does otherwise is said by the fields of ``EngineConfig``, so whatever can be configured
can be tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from app.config import Settings
from app.errors import ConfigError
from llm_core import EngineConfig

# These are not for the words: the model has a name of its own, the cache belongs to the server.
_FIXED = ("model_path", "native_cache_dir")
OPTION_NAMES = tuple(name for name in EngineConfig.__struct_fields__ if name not in _FIXED)


def parse_options(text: str) -> tuple[str, dict[str, str]]:
    """``"package:x,kv_dtype=int8"`` -> the model ("" when none is named) and the options.

    Raises ConfigError for a word without a value in any place but the first, and for a name that
    is no option.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    model = words.pop(0) if words and "=" not in words[0] else ""
    options: dict[str, str] = {}
    for word in words:
        name, is_pair, value = word.partition("=")
        if not is_pair:
            raise ConfigError(f"{word!r}: expected name=value in {text!r}")
        if name not in OPTION_NAMES:
            raise ConfigError(
                f"{name!r} is no option of an engine; there are {', '.join(OPTION_NAMES)}"
            )
        options[name] = value
    return model, options


def engine_config(
    settings: Settings, model_path: Path, options: Mapping[str, str] | None = None
) -> EngineConfig:
    """As the server's settings have it, with ``options`` on top. Raises ConfigError."""
    config = EngineConfig(
        model_path=str(model_path),
        num_threads=settings.llm_threads,
        max_sequences=settings.llm_max_sequences,
        max_context=settings.llm_max_context,
        backend=settings.llm_backend,
        tensor_parallel=settings.llm_tensor_parallel,
        kv_dtype=settings.llm_kv_dtype,
        policy=settings.llm_policy,
        max_step_ms=settings.llm_max_step_ms,
        standby=settings.llm_standby,
        native_cache_dir=str(settings.home / "native"),
    )
    if not options:
        return config
    fields = {**msgspec.structs.asdict(config), **options}
    try:
        return msgspec.convert(fields, EngineConfig, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"an engine cannot be started with {dict(options)}: {error}") from error
