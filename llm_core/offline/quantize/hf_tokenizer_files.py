"""Converts the tokenizer of a GGUF file to Hugging Face's files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llm_core.errors import ModelLoadError
from llm_core.tokenizer import CONTROL, USER_DEFINED, Tokenizer


def tokenizer_files(metadata: Mapping[str, Any], context_len: int) -> dict[str, Any]:
    """File name -> JSON object, or text for chat_template.jinja. Raises ModelLoadError."""
    tokenizer = Tokenizer.from_gguf(metadata)
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    types: Sequence[int] = metadata["tokenizer.ggml.token_type"]
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_len,
        "eos_token": tokenizer.eos_token,
    }
    if tokenizer.bos_token:
        settings["bos_token"] = tokenizer.bos_token
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str):
        raise ModelLoadError("the file has no chat template: it is not a chat model")
    ends: dict[str, Any] = {"eos_token_id": sorted(tokenizer.eos_ids)}
    if tokenizer.bos_id is not None:
        ends["bos_token_id"] = tokenizer.bos_id
    return {
        "tokenizer.json": _definition(tokenizer, tokens, types),
        "tokenizer_config.json": settings,
        "generation_config.json": ends,
        "chat_template.jinja": template,
    }


def _definition(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> Any:
    definition = json.loads(tokenizer.pipeline.first.to_str())
    vocab = definition["model"]["vocab"]
    added = []
    for token_id, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        is_control = tokenizer.control_tokens.get(text) == token_id
        if is_control or kind in (CONTROL, USER_DEFINED):
            vocab[text] = token_id
            added.append(
                {
                    "id": token_id,
                    "content": text,
                    "single_word": False,
                    "lstrip": text in tokenizer.strip_before,
                    "rstrip": text in tokenizer.strip_after,
                    "normalized": False,
                    "special": is_control,
                }
            )
    definition["added_tokens"] = added
    definition["decoder"] = _decoder(tokenizer.pipeline.is_byte_level)
    return definition


def _decoder(is_byte_level: bool) -> dict[str, Any]:
    if is_byte_level:
        return {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        }
    return {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    }
