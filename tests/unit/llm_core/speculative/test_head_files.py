"""Head files: round trips, published checkpoints, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_core.config import ModelConfig
from llm_core.errors import ModelLoadError
from llm_core.loading.safetensors import SafetensorsFile
from llm_core.loading.safetensors_writer import write_safetensors
from llm_core.speculative.heads.config import HeadConfig
from llm_core.speculative.heads.eagle import head_shapes
from llm_core.speculative.heads.files import (
    BUNDLED_DIR,
    CONFIG_NAME,
    TENSORS_NAME,
    HeadFile,
    bundled_head,
    fingerprint,
    quantize_rows,
    read_head,
    write_head,
)
from tests.support.random_head import random_head_tensors

TARGET = ModelConfig(
    num_layers=8,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=200,
    context_len=128,
)
HEAD = HeadConfig(
    kind="eagle3",
    hidden_size=64,
    vocab_size=200,
    draft_vocab_size=32,
    feature_layers=(4, 5, 8),
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    target_name="some-model",
    target_fingerprint="0123456789abcdef",
)
PUBLISHED = {
    "hidden_size": 64,
    "vocab_size": 200,
    "draft_vocab_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A valid head."""
    write_head(tmp_path / "head", HeadFile(HEAD, random_head_tensors(HEAD)), is_int8=False)
    return tmp_path / "head"


def change_config(directory: Path, **changes: object) -> None:
    path = directory / CONFIG_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    with SafetensorsFile(directory / TENSORS_NAME) as file:
        tensors = {name: file.read(name) for name in file.tensors}
    for name, value in changes.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    write_safetensors(directory / TENSORS_NAME, tensors)


@pytest.mark.parametrize("is_int8", [False, True])
def test_head_round_trip(tmp_path: Path, is_int8: bool) -> None:
    tensors = random_head_tensors(HEAD)
    write_head(tmp_path, HeadFile(HEAD, tensors, {"steps": 5}), is_int8=is_int8)
    head = read_head(tmp_path, TARGET, HEAD.target_fingerprint)
    assert head.config == HEAD and head.card == {"steps": 5}
    assert {*head.tensors} == {*head_shapes(HEAD), "d2t"}
    for name, value in tensors.items():
        if name == "d2t" or value.dim() == 1:
            assert torch.equal(head.tensors[name], value)
        elif is_int8:
            step = value.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
            error = (head.tensors[name] - value).unflatten(1, (-1, 32)).abs()
            assert bool((error <= 0.51 * step + 127 * step * 2**-11).all()), name
        else:
            assert torch.equal(head.tensors[name], value.half().float())


def test_quantize_rows_of_zeros_and_tiny_values() -> None:
    weight = torch.cat([torch.zeros(1, 32), torch.full((1, 32), 1e-3), torch.full((1, 32), -2.0)])
    codes, scale = quantize_rows(weight)
    assert torch.allclose(codes.float() * scale.float(), weight, rtol=1e-2)


@pytest.mark.parametrize("is_eagle3", [False, True])
def test_published_checkpoints_are_read(tmp_path: Path, is_eagle3: bool) -> None:
    config = HEAD if is_eagle3 else replace(
        HEAD,
        kind="eagle1",
        draft_vocab_size=200,
        feature_layers=(8,),
        has_lm_head=False,
        has_draft_vocab=False,
    )  # fmt: skip
    tensors = random_head_tensors(config)
    tensors["embed_tokens.weight"] = torch.zeros(200, 64)
    if not is_eagle3:
        del tensors["fc.bias"]  # published with and without
    write_safetensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    head = read_head(tmp_path, TARGET, "another")  # says nothing of its target
    assert head.config.kind == config.kind and head.config.rope_theta == 500000.0
    assert head.config.feature_layers == ((1, 3, 4) if is_eagle3 else (8,))
    assert torch.equal(head.tensors["fc.weight"], tensors["fc.weight"])
    assert is_eagle3 or not head.tensors["fc.bias"].any()


def test_eagle3_without_d2t_uses_the_full_vocabulary(tmp_path: Path) -> None:
    config = replace(HEAD, draft_vocab_size=200, has_draft_vocab=False)
    write_safetensors(tmp_path / "model.safetensors", random_head_tensors(config))
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | {"draft_vocab_size": 200}))
    assert not read_head(tmp_path, TARGET, None).config.has_draft_vocab


@pytest.mark.parametrize(
    ("target", "mark", "message"),
    [
        ({"hidden_size": 96}, None, "hidden_size 64, this one has 96"),
        ({"vocab_size": 201}, None, "vocab_size 200, this one has 201"),
        ({"num_layers": 7}, None, "reads layer 8, the model has 7"),
        ({}, "fedcba9876543210", "trained for some-model of fingerprint 0123456789abcdef"),
    ],
)
def test_head_of_another_model_is_refused(
    directory: Path, target: dict[str, int], mark: str | None, message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_head(directory, replace(TARGET, **target), mark)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("fc.weight", None, "lacks the tensors fc.weight"),
        ("d2t", None, "lacks the tensors d2t"),
        ("fc.weight", torch.zeros(64, 64), r"fc.weight has shape \(64, 64\), expected \(64, 192\)"),
        ("norm.weight", torch.full((64,), float("nan")), "norm.weight has values that are not"),
        ("norm.weight", torch.ones(64, dtype=torch.int64), "expected floats"),
        ("d2t", torch.full((32,), 500), "outside the target's vocabulary"),
        ("d2t", torch.zeros(32), "expected integers"),
        ("fc.weight", torch.zeros(64, 192, dtype=torch.int8), "no fc.weight_scale"),
        ("norm.weight", torch.zeros(64, dtype=torch.int8), "norm.weight .* expected a matrix"),
        ("embed_tokens.weight", torch.zeros(300, 64), r"embedding has \(200, 64\)"),
    ],
)
def test_invalid_tensors_are_named(
    directory: Path, name: str, value: torch.Tensor | None, message: str
) -> None:
    change_tensors(directory, **{name: value})
    with pytest.raises(ModelLoadError, match=message):
        read_head(directory, TARGET, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "eagle9"}, "kind is 'eagle9'"),
        ({"draft_vocab_size": 201}, "exceeds vocab_size"),
        ({"num_heads": 3}, "shared evenly"),
        ({"feature_layers": []}, "feature_layers"),
        ({"feature_layers": [1, "x"]}, "expected a list of layers"),
        ({"hidden_size": True}, "expected int"),
        ({"rms_eps": float("nan")}, "expected a positive number"),
        ({"shell": 1}, "not a field"),
        ({"num_medusa_heads": 2}, "num_medusa_heads"),
    ],
)
def test_invalid_configurations_are_named(
    directory: Path, changes: dict[str, object], message: str
) -> None:
    change_config(directory, **changes)
    with pytest.raises(ModelLoadError, match=message):
        read_head(directory, TARGET, None)


def test_directories_without_a_head_are_refused(tmp_path: Path, directory: Path) -> None:
    with pytest.raises(ModelLoadError, match="holds no draft head"):
        read_head(tmp_path, TARGET, None)
    (directory / CONFIG_NAME).write_text("[" * 100_000)
    with pytest.raises(ModelLoadError, match="not sound JSON"):
        read_head(directory, TARGET, None)


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    write_head(tmp_path / "head", HeadFile(HEAD, random_head_tensors(HEAD)), is_int8=True)
    scale = torch.ones(64, 6).half()
    scale[1, 2] = float("nan")
    change_tensors(tmp_path / "head", **{"fc.weight_scale": scale})
    with pytest.raises(ModelLoadError, match="fc.weight has values that are not finite"):
        read_head(tmp_path / "head", TARGET, None)


def test_a_header_of_two_gigabytes_is_refused(directory: Path) -> None:
    with (directory / TENSORS_NAME).open("r+b") as file:  # sparse: takes no room on disk
        file.write((2 << 30).to_bytes(8, "little"))
        file.truncate(3 << 30)
    with pytest.raises(ModelLoadError, match="header claims 2147483648 bytes"):
        read_head(directory, TARGET, None)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_damaged_files_are_read_or_refused(directory: Path, data: st.DataObject) -> None:
    """Changed bytes and settings give a head or a ModelLoadError."""
    path, config_path = directory / TENSORS_NAME, directory / CONFIG_NAME
    sound, config = path.read_bytes(), config_path.read_text()
    damaged = bytearray(sound)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.one_of(st.integers(0, 1200), st.integers(0, len(sound) - 1)))
        damaged[at] = data.draw(st.sampled_from([0, ord("0"), ord("9"), ord("I"), 0x7F, 0xFF]))
    path.write_bytes(damaged)
    if data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(json.loads(config))))
        values = [None, 0, -1, 2**40, 10**30, 0.5, float("inf"), "x", [], [2**40], {}, True]
        change_config(directory, **{key: data.draw(st.sampled_from(values))})
    try:
        assert read_head(directory, TARGET, None).tensors
    except ModelLoadError as error:
        assert str(error)
    finally:
        path.write_bytes(sound)
        config_path.write_text(config)


def test_fingerprint_depends_on_shape_and_norms() -> None:
    weights = {
        "final_norm": torch.linspace(1, 2, 64),
        "layers.0.attention_norm": torch.ones(64),
    }
    mark = fingerprint(TARGET, weights)
    assert len(mark) == 16 and mark == fingerprint(TARGET, dict(weights))
    assert mark != fingerprint(replace(TARGET, num_layers=9), weights)
    weights["final_norm"] = torch.linspace(1, 2.001, 64)
    assert mark != fingerprint(TARGET, weights)


def test_bundled_head_is_small_and_valid() -> None:
    (path,) = (entry.parent for entry in BUNDLED_DIR.glob(f"*/{CONFIG_NAME}"))
    config = HeadConfig.from_values(json.loads((path / CONFIG_NAME).read_text()))
    assert bundled_head(config.target_fingerprint) == path
    assert bundled_head("0" * 16) is None
    assert sum(file.stat().st_size for file in path.iterdir()) < 10_000_000
    target = ModelConfig(
        num_layers=30,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=49152,
        context_len=2048,
    )
    head = read_head(path, target, config.target_fingerprint)
    assert head.card  # what it was made of
    with pytest.raises(ModelLoadError, match="trained for SmolLM2"):
        read_head(path, target, "0" * 16)
