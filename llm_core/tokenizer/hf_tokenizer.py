"""A tokenizer from the files of a Hugging Face model directory.

tokenizer.json defines how text is cut and merged, and is followed to the letter, except that
control tokens are taken out of it, so that no text becomes one. tokenizer_config.json names the
first and the last token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from llm_core.errors import ModelLoadError
from llm_core.tokenizer.text_pipeline import json_pipeline
from llm_core.tokenizer.tokenizer import (
    ALWAYS_CONTROL,
    BYTE,
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    Tokenizer,
)

_MAX_TOKENS = 1 << 22


def tokenizer_from_json(
    definition: Mapping[str, Any], settings: Mapping[str, Any], eos_ids: Iterable[int]
) -> Tokenizer:
    """``definition`` is tokenizer.json, ``settings`` tokenizer_config.json ({} if there is none),
    ``eos_ids`` the ends that generation_config.json names. Raises ModelLoadError.

    No BOS is added: a chat template writes it where the model wants it.
    """
    vocab = _vocab(definition)
    added = _added_tokens(definition)
    texts, types = _tokens(vocab, added)
    control = [token for token in added if types[token["id"]] == CONTROL]
    kept = {token["content"]: token["id"] for token in added if token not in control}
    pipeline = json_pipeline(
        {**definition, "added_tokens": added}, [token["content"] for token in control], kept
    )
    if not pipeline.is_byte_level:
        for text, token_id in vocab.items():
            if types[token_id] == NORMAL and re.fullmatch(r"<0x[0-9A-F]{2}>", text):
                types[token_id] = BYTE
    ids = {text: token_id for token_id, text in enumerate(texts) if text}
    ends = [ids[end] for end in [token_text(settings, "eos_token")] if end in ids]
    bos = token_text(settings, "bos_token")
    return Tokenizer(
        tokens=texts,
        token_types=types,
        pipeline=pipeline,
        bos_id=ids.get(bos),
        eos_ids=[*ends, *eos_ids],
        strip_before=[token["content"] for token in control if token.get("lstrip")],
        strip_after=[token["content"] for token in control if token.get("rstrip")],
    )


def token_text(settings: Mapping[str, Any], key: str) -> str:
    """A token that tokenizer_config.json names, as text or as an object; "" if it does not."""
    value = settings.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _vocab(definition: Mapping[str, Any]) -> dict[str, int]:
    model = definition.get("model")
    kind = model.get("type", "BPE") if isinstance(model, dict) else None
    if kind != "BPE" or not isinstance(model, dict):
        raise ModelLoadError(f"tokenizer.json: model type {kind!r:.40} is not supported, only BPE")
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not all(map(_is_id, vocab.values())):
        raise ModelLoadError(
            f"tokenizer.json: model.vocab is not an object of ids below {_MAX_TOKENS}"
        )
    if not isinstance(model.get("merges", []), list):
        raise ModelLoadError("tokenizer.json: model.merges is not a list")
    return vocab


def _added_tokens(definition: Mapping[str, Any]) -> list[dict[str, Any]]:
    added = definition.get("added_tokens", [])
    if not isinstance(added, list) or not all(
        isinstance(token, dict)
        and isinstance(token.get("content"), str)
        and _is_id(token.get("id"))
        for token in added
    ):
        raise ModelLoadError("tokenizer.json: added_tokens is not a list of tokens with ids")
    return added


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_TOKENS


def _tokens(vocab: Mapping[str, int], added: list[dict[str, Any]]) -> tuple[list[str], list[int]]:
    """Texts and types by id; ids that no token has are unused."""
    size = 1 + max([*vocab.values(), *(token["id"] for token in added)], default=-1)
    texts, types = [""] * size, [UNUSED] * size
    for text, token_id in vocab.items():
        texts[token_id], types[token_id] = text, NORMAL
    for token in added:
        is_control = token.get("special") or ALWAYS_CONTROL.fullmatch(token["content"])
        texts[token["id"]] = token["content"]
        types[token["id"]] = CONTROL if is_control else USER_DEFINED
    return texts, types
