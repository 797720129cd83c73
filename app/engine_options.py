"""How an engine is started, as words: ``MODEL,name=value,...``.

A server's own engine follows its settings; what a second engine (a roll-out, one side of a
comparison) does otherwise is said by the fields of ``EngineConfig``, so whatever can be configured
can be tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from app.config import Settings
from app.errors import ConfigError
from llm_core import EngineConfig

# These are not for the words: the model has a name of its own, cache and logs are the server's.
_FIXED = ("model_path", "native_cache_dir", "log_format")
_NAMED_OTHERWISE = {"num_threads": "llm_threads"}
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
    fields = {
        "model_path": str(model_path),
        "native_cache_dir": str(settings.compiled_dir),
        "log_format": settings.log_format,
        **_from_settings(settings),
        **(options or {}),
    }
    try:
        return msgspec.convert(fields, EngineConfig, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        given = f" with {dict(options)}" if options else ""
        raise ConfigError(f"an engine cannot be started{given}: {error}") from error


def setting_of(option: str) -> str | None:
    """The field of ``Settings`` for an option of an engine; None: there is none."""
    name = _NAMED_OTHERWISE.get(option, f"llm_{option}")
    return name if name in Settings.model_fields else None


def _from_settings(settings: Settings) -> dict[str, Any]:
    names = {option: setting_of(option) for option in OPTION_NAMES}
    return {option: getattr(settings, name) for option, name in names.items() if name}
