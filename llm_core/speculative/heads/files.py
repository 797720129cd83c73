"""Draft heads as files: a directory with ``head.safetensors``, ``head_config.json``, ``card.json``.

Matrices may be stored as int8 codes with a float16 scale for each 32 inputs (tensors NAME and
NAME_scale), else as floats. Published EAGLE checkpoints (``model.safetensors`` and ``config.json``)
are read too. Shapes, vocabulary and values are validated, and a head that names the model it was
trained for is refused for any other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from llm_core.config import ModelConfig
from llm_core.errors import ModelLoadError
from llm_core.loading import SafetensorsFile, read_json, write_safetensors
from llm_core.quant import Weight, to_float
from llm_core.speculative.heads.config import HeadConfig
from llm_core.speculative.heads.eagle import LAYER, head_shapes, target_ids

TENSORS_NAME = "head.safetensors"
CONFIG_NAME = "head_config.json"
CARD_NAME = "card.json"
BUNDLED_DIR = Path(__file__).resolve().parent
_PUBLISHED_TENSORS = "model.safetensors"
_PUBLISHED_CONFIG = "config.json"
_GROUP = 32
_LARGEST_CODE = 127


@dataclass(frozen=True, slots=True)
class HeadFile:
    """A head's content: ``tensors`` float32 by the names of ``eagle.head_shapes``, and ``d2t``;
    ``card``: its training data and results."""

    config: HeadConfig
    tensors: dict[str, torch.Tensor]
    card: dict[str, Any] = field(default_factory=dict)


def fingerprint(config: ModelConfig, weights: Mapping[str, Weight]) -> str:
    """16 hex digits that identify a model whatever its matrices are quantised to: a hash of its
    shape and of norm weights, which all formats keep in full precision."""
    digest = hashlib.sha256(
        json.dumps(
            [
                *(config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads),
                *(config.head_dim, config.intermediate_size, config.vocab_size),
            ]
        ).encode()
    )
    for name in ("final_norm", "layers.0.attention_norm"):
        digest.update(to_float(weights[name]).contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def bundled_head(target_fingerprint: str) -> Path | None:
    """The directory of the head that is bundled with this package for a target, or None.

    Raises ModelLoadError for a damaged installation.
    """
    for path in sorted(BUNDLED_DIR.glob(f"*/{CONFIG_NAME}")):
        if _own_config(path).target_fingerprint == target_fingerprint:
            return path.parent
    return None


def is_head_directory(path: Path) -> bool:
    """True if ``path`` holds a draft head, ours or a published one, rather than a model."""
    if not path.is_dir():
        return False
    if (path / CONFIG_NAME).exists():
        return True
    tensors_path = path / _PUBLISHED_TENSORS
    if not tensors_path.exists():
        return False
    with SafetensorsFile(tensors_path) as file:
        return "fc.weight" in file.tensors


def write_head(directory: Path, head: HeadFile, *, is_int8: bool) -> None:
    """Creates ``directory``. ``is_int8``: matrices as codes, else as float16."""
    directory.mkdir(parents=True, exist_ok=True)
    stored: dict[str, torch.Tensor] = {}
    for name, value in head.tensors.items():
        if not value.is_floating_point() or value.dim() != 2:
            stored[name] = value
        elif is_int8 and value.shape[1] % _GROUP == 0:
            stored[name], stored[f"{name}_scale"] = quantize_rows(value)
        else:
            stored[name] = value.half()
    write_safetensors(directory / TENSORS_NAME, stored)
    (directory / CONFIG_NAME).write_text(head.config.to_json(), encoding="utf-8")
    (directory / CARD_NAME).write_text(json.dumps(head.card, indent=2) + "\n", encoding="utf-8")


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float [N, K] -> codes int8 [N, K], scales float16 [N, K / 32]; weight ~ code * scale."""
    groups = weight.float().view(len(weight), -1, _GROUP)
    scale = (groups.abs().amax(-1) / _LARGEST_CODE).half()
    divisor = torch.where(scale > 0, scale.float(), 1.0)
    codes = (groups / divisor.unsqueeze(-1)).round().clamp(-_LARGEST_CODE, _LARGEST_CODE)
    return codes.to(torch.int8).flatten(1), scale


def read_head(directory: Path, target: ModelConfig, target_fingerprint: str | None) -> HeadFile:
    """The head in ``directory``, for a target of this shape and fingerprint (None: not checked).

    Raises ModelLoadError for a head that is damaged or does not fit the target.
    """
    own = directory / CONFIG_NAME
    is_own = own.exists()
    tensors_path = directory / (TENSORS_NAME if is_own else _PUBLISHED_TENSORS)
    config_path = own if is_own else directory / _PUBLISHED_CONFIG
    if not tensors_path.exists() or not config_path.exists():
        raise ModelLoadError(
            f"{directory}: holds no draft head: expected {CONFIG_NAME} with {TENSORS_NAME}, or "
            f"{_PUBLISHED_CONFIG} with {_PUBLISHED_TENSORS} (pickles are never read)"
        )
    with SafetensorsFile(tensors_path) as file:
        if is_own:
            config = _own_config(config_path)
        else:
            config = _published_config(config_path, set(file.tensors), target)
        check_fits(config, target, target_fingerprint, directory.name)
        tensors = _read_tensors(file, config, target)
    card_path = directory / CARD_NAME
    card = read_json(card_path) if is_own and card_path.exists() else {}
    return HeadFile(config, tensors, card)


def check_fits(
    config: HeadConfig, target: ModelConfig, target_fingerprint: str | None, name: str
) -> None:
    """Raises ModelLoadError for a head that was made for another model."""
    for what in ("hidden_size", "vocab_size"):
        has, needed = getattr(config, what), getattr(target, what)
        if has != needed:
            raise ModelLoadError(
                f"{name}: the head was made for a model of {what} {has}, this one has {needed}"
            )
    if max(config.feature_layers) > target.num_layers:
        raise ModelLoadError(
            f"{name}: the head reads layer {max(config.feature_layers)}, "
            f"the model has {target.num_layers}"
        )
    if (
        target_fingerprint is not None
        and config.target_fingerprint
        and config.target_fingerprint != target_fingerprint
    ):
        raise ModelLoadError(
            f"{name}: the head was trained for {config.target_name or 'a model'} of fingerprint "
            f"{config.target_fingerprint}, this one has {target_fingerprint}"
        )


def _read_tensors(
    file: SafetensorsFile, config: HeadConfig, target: ModelConfig
) -> dict[str, torch.Tensor]:
    name = file.path.name
    shapes = head_shapes(config)
    # EAGLE-1 is published with and without a bias.
    optional = {"fc.bias"} - set(file.tensors)
    shapes = {key: shape for key, shape in shapes.items() if key not in optional}
    if config.has_draft_vocab:
        shapes["d2t"] = (config.draft_vocab_size,)
    missing = sorted(key for key in shapes if key not in file.tensors)
    if missing:
        raise ModelLoadError(f"{name}: lacks the tensors {', '.join(missing)}")
    embedding = file.tensors.get("embed_tokens.weight")
    if embedding is not None and embedding.shape != (target.vocab_size, target.hidden_size):
        raise ModelLoadError(
            f"{name}: embed_tokens.weight has shape {embedding.shape}, the model's embedding has "
            f"{(target.vocab_size, target.hidden_size)}"
        )
    tensors: dict[str, torch.Tensor] = {}
    for key, shape in shapes.items():
        if file.tensors[key].shape != shape:
            raise ModelLoadError(
                f"{name}: tensor {key} has shape {file.tensors[key].shape}, expected {shape}"
            )
        tensors[key] = _read_tensor(file, key)
    if "fc.bias" in optional and config.kind == "eagle1":
        tensors["fc.bias"] = torch.zeros(config.hidden_size)
    try:
        target_ids(config, tensors)
    except ValueError as error:
        raise ModelLoadError(f"{name}: {error}") from error
    return tensors


def _read_tensor(file: SafetensorsFile, key: str) -> torch.Tensor:
    value, name = file.read(key), file.path.name
    if key == "d2t":
        if value.dtype not in (torch.int32, torch.int64):
            raise ModelLoadError(f"{name}: d2t is {value.dtype}, expected integers")
        return value.to(torch.int64)
    if value.dtype == torch.int8:
        if value.dim() != 2 or value.shape[1] % _GROUP != 0:
            raise ModelLoadError(
                f"{name}: tensor {key} has codes of shape {tuple(value.shape)}, expected a matrix "
                f"whose rows are multiples of {_GROUP}"
            )
        scale = file.tensors.get(f"{key}_scale")
        expected = (value.shape[0], value.shape[1] // _GROUP)
        if scale is None or scale.shape != expected:
            raise ModelLoadError(f"{name}: {key} has codes, but no {key}_scale of {expected}")
        scales = file.read(f"{key}_scale").float()
        groups = value.view(len(value), -1, _GROUP)
        value = (groups.float() * scales.unsqueeze(-1)).flatten(1)
    elif not value.is_floating_point():
        raise ModelLoadError(f"{name}: tensor {key} is {value.dtype}, expected floats or int8")
    value = value.float()
    if not bool(torch.isfinite(value).all()):
        raise ModelLoadError(f"{name}: tensor {key} has values that are not finite")
    return value


def _own_config(path: Path) -> HeadConfig:
    try:
        return HeadConfig.from_values(read_json(path))
    except ValueError as error:
        raise ModelLoadError(f"{path.name}: {error}") from error


def _published_config(path: Path, names: set[str], target: ModelConfig) -> HeadConfig:
    """From a Hugging Face config.json; ``names`` of tensors tell EAGLE-3 from EAGLE-1."""
    values = read_json(path)
    is_eagle3 = any(name.startswith(LAYER) for name in names)
    if not is_eagle3 and not any(name.startswith("layers.0.") for name in names):
        raise ModelLoadError(f"{path.name}: neither EAGLE-1's nor EAGLE-3's tensors are there")

    def number(name: str, default: int | None = None) -> int:
        value = values.get(name, default)
        if type(value) is not int:
            raise ModelLoadError(f"{path.name}: {name} is {value!r:.40}, expected a whole number")
        return value

    num_heads, hidden = number("num_attention_heads"), number("hidden_size")
    vocab = number("vocab_size")
    last = target.num_layers
    # EAGLE-3 reads the inputs of layers 2, L / 2 and L - 3: the outputs of those before.
    layers = tuple(max(0, i - 1) for i in (2, last // 2, last - 3)) if is_eagle3 else (last,)
    has_draft_vocab = is_eagle3 and "d2t" in names
    try:
        config = HeadConfig(
            kind="eagle3" if is_eagle3 else "eagle1",
            hidden_size=hidden,
            vocab_size=vocab,
            draft_vocab_size=number("draft_vocab_size", vocab) if is_eagle3 else vocab,
            feature_layers=layers,
            num_heads=num_heads,
            num_kv_heads=number("num_key_value_heads", num_heads),
            head_dim=number("head_dim", hidden // max(1, num_heads)),
            intermediate_size=number("intermediate_size"),
            rms_eps=float(values.get("rms_norm_eps", 1e-6)),
            rope_theta=float(values.get("rope_theta", target.rope_theta)),
            has_lm_head=is_eagle3 and "lm_head.weight" in names,
            has_draft_vocab=has_draft_vocab,
        )
    except (ValueError, TypeError) as error:
        raise ModelLoadError(f"{path.name}: {error}") from error
    return replace(config, target_name=str(values.get("_name_or_path", "")))
