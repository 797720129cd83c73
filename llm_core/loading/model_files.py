"""The files of a model: weights, tokenizer, chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_core.chat import ChatTemplate
from llm_core.errors import ModelLoadError
from llm_core.loading.gguf.container import read_metadata
from llm_core.loading.hf.checkpoint import read_json
from llm_core.loading.model_weights import open_weights
from llm_core.loading.weights import ModelWeights
from llm_core.tokenizer import Tokenizer, token_text, tokenizer_from_json

_MAX_TEMPLATE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class OpenModel:
    """``model.weights`` must be read within the context of ``open_model``."""

    model: ModelWeights
    tokenizer: Tokenizer
    template: ChatTemplate


@contextmanager
def open_model(path: str | Path) -> Iterator[OpenModel]:
    """The model at ``path``: a .gguf file, or a Hugging Face directory with safetensors.

    Raises ModelLoadError, also without a chat template, or for a tokenizer with too many tokens.
    """
    path = Path(path)
    with open_weights(path) as model:
        tokenizer, template = _read_directory(path) if path.is_dir() else _read_gguf(path)
        if model.config.vocab_size < tokenizer.vocab_size:
            raise ModelLoadError(
                f"the tokenizer knows {tokenizer.vocab_size} tokens, "
                f"the model only {model.config.vocab_size}"
            )
        yield OpenModel(model, tokenizer, template)


def load_template(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template of a GGUF file. Raises ModelLoadError."""
    source = metadata.get("tokenizer.chat_template")
    if not isinstance(source, str):
        raise ModelLoadError("the file has no chat template: it is not a chat model")
    return ChatTemplate(
        source,
        control_tokens=tokenizer.control_tokens,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
    )


def _read_gguf(path: Path) -> tuple[Tokenizer, ChatTemplate]:
    metadata = read_metadata(path)
    tokenizer = Tokenizer.from_gguf(metadata)
    return tokenizer, load_template(metadata, tokenizer)


def _read_directory(directory: Path) -> tuple[Tokenizer, ChatTemplate]:
    settings_file = directory / "tokenizer_config.json"
    settings = read_json(settings_file) if settings_file.exists() else {}
    definition = read_json(directory / "tokenizer.json")
    tokenizer = tokenizer_from_json(definition, settings, _eos_ids(directory))
    template = ChatTemplate(
        _template_source(directory, settings),
        control_tokens=tokenizer.control_tokens,
        bos_token=token_text(settings, "bos_token"),
        eos_token=token_text(settings, "eos_token"),
    )
    return tokenizer, template


def _eos_ids(directory: Path) -> list[int]:
    """End-of-sequence ids of generation_config.json (usually complete) and config.json."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        value = read_json(file).get("eos_token_id") if file.exists() else None
        values = value if isinstance(value, list) else [value]
        if not all(item is None or type(item) is int for item in values):
            raise ModelLoadError(f"{name}: eos_token_id is {value!r:.60}, expected ids")
        ids += [item for item in values if item is not None and item not in ids]
    return ids


def _template_source(directory: Path, settings: Mapping[str, Any]) -> str:
    """From chat_template.jinja, chat_template.json or tokenizer_config.json, as in transformers."""
    file = directory / "chat_template.jinja"
    if file.exists():
        if file.stat().st_size > _MAX_TEMPLATE_BYTES:
            raise ModelLoadError(f"{file.name}: larger than {_MAX_TEMPLATE_BYTES} bytes")
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"{file.name}: cannot be read: {error}") from error
    file = directory / "chat_template.json"
    source = (read_json(file) if file.exists() else settings).get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        raise ModelLoadError(f"{directory.name}: has no chat template: it is not a chat model")
    return source
