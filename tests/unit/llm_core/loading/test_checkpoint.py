"""Damaged, incomplete or hostile Hugging Face directories are rejected by name, at low cost."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from llm_core.errors import ModelLoadError
from llm_core.loading.hf.checkpoint import Checkpoint, read_json
from llm_core.loading.hf.model import open_hf_model
from llm_core.loading.model_weights import open_weights
from llm_core.loading.safetensors import SafetensorsFile
from llm_core.loading.safetensors_writer import write_safetensors
from llm_core.loading.weights import model_name
from tests.support.hf_models import save_model

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
NORM = "model.layers.0.input_layernorm.weight"


def safetensors(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound")
    save_model(directory, "llama", num_hidden_layers=1, vocab_size=40)
    return directory


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    """A directory like ``sound``, to be damaged."""
    for file in sound.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def refuses(directory: Path, message: str) -> None:
    """Opening, or else reading all weights, is refused."""
    with pytest.raises(ModelLoadError, match=message), open_hf_model(directory) as model:
        dict(model.weights)


def test_every_dtype_is_read_as_written(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    written = {}
    for number, dtype in enumerate(DTYPES):
        values = torch.randint(0, 100, (3, number + 1), generator=generator)
        written[f"t{number}"] = values.to(dtype)
    written["scalar"] = torch.tensor(1.5)
    written["empty"] = torch.empty(0, 4)
    save_file(written, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with Checkpoint(tmp_path) as checkpoint:
        read = {name: checkpoint.read(name) for name in checkpoint.names}
    assert read.keys() == written.keys()
    for name, values in written.items():  # after the file was closed: they are copies
        assert read[name].dtype == values.dtype
        assert torch.equal(read[name].float(), values.float()), name


TWO = {"a": entry(), "b": entry(offsets=[8, 16])}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"1234567", "truncated: 7 bytes, the header length alone has 8"),
        (safetensors(b"{}", length=2**63), "header claims 9223372036854775808 bytes"),
        (safetensors(b"{}", length=2 * 2**30), "header claims 2147483648 bytes"),
        (safetensors(b"{}", length=3), "header claims 3 bytes; the file has 10"),
        (b"GGUF" + bytes(100), "not a safetensors file, or truncated"),
        (b"PK\x03\x04" + bytes(100), "not a safetensors file, or truncated"),
        (safetensors(b"{"), "the header is not sound JSON"),
        (safetensors(b"\xff\xfe"), "the header is not sound JSON"),
        (safetensors(b"[" * 100_000), "the header is not sound JSON"),
        (safetensors(b'{"a":' * 50_000), "the header is not sound JSON"),
        (safetensors(b"[1]"), "the header is not a JSON object"),
        (safetensors(b'{"a": 1, "a": 2}'), "'a' occurs twice"),
        (safetensors({"a": 3}), "tensor a is not described by a JSON object"),
        (safetensors({"a": entry("F4")}, bytes(8)), "tensor a has dtype 'F4', supported are F64"),
        (safetensors({"a": entry(shape=[-1])}, bytes(8)), "tensor a has shape .-1., expected"),
        (safetensors({"a": entry(shape=[True, 2])}, bytes(8)), "tensor a has shape .True, 2."),
        (safetensors({"a": entry(shape=[1.5])}, bytes(8)), "tensor a has shape .1.5."),
        (safetensors({"a": entry(shape=[1] * 9)}, bytes(8)), "expected up to 8 sizes"),
        (safetensors({"a": entry(shape=[2**60])}, bytes(8)), "tensor a has shape"),
        (
            safetensors({"a": entry(shape=[2**40] * 8)}, bytes(8)),
            "has 8 bytes, expected .* of shap",
        ),
        (safetensors({"a": entry(shape=[3])}, bytes(8)), r"has 8 bytes, expected 12 for F32 of s"),
        (safetensors({"a": entry(offsets=[8, 0])}, bytes(8)), "tensor a has -8 bytes, expected 8"),
        (safetensors({"a": entry(offsets=[0])}, bytes(8)), "tensor a has data_offsets .0., expe"),
        (safetensors({"a": entry(offsets=None)}, bytes(8)), "tensor a has data_offsets None"),
        (safetensors({"a": entry()}, bytes(7)), "truncated: tensor a ends at byte"),
        (safetensors({"a": entry()}, bytes(9)), "1 bytes at the end belong to no tensor"),
        (safetensors({"a": entry(), "b": entry()}, bytes(8)), "tensor b overlaps tensor a"),
        (
            safetensors({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)),
            "tensor b overlaps tensor a",
        ),
        (
            safetensors({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20)),
            "tensor b leaves a gap after tensor a",
        ),
        (safetensors({"a": entry(offsets=[4, 12])}, bytes(12)), "a leaves a gap after the header"),
    ],
)
def test_wrong_containers(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(ModelLoadError, match=message):
        SafetensorsFile(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 3_000_000


def test_two_gigabyte_header_is_rejected_unread(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:  # sparse: takes no room on disk
        file.write(struct.pack("<Q", 2 * 2**30))
        file.truncate(3 * 2**30)
    tracemalloc.start()
    with pytest.raises(ModelLoadError, match="header claims 2147483648 bytes"):
        SafetensorsFile(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100_000


def test_every_truncation_is_rejected(copy: Path) -> None:
    file = copy / "model.safetensors"
    whole = file.read_bytes()
    header_len = 8 + int.from_bytes(whole[:8], "little")
    for length in [1, 7, 8, 9, header_len - 1, header_len, header_len + 5, len(whole) - 1]:
        file.write_bytes(whole[:length])
        refuses(copy, "truncated|header claims")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(NORM), f"tensor {NORM} is missing"),
        (lambda t: t.pop("model.embed_tokens.weight"), "model.embed_tokens.weight is missing"),
        (lambda t: t.pop("lm_head.weight"), "tensor lm_head.weight is missing"),
        (
            lambda t: t.update({NORM: torch.ones(63)}),
            rf"model.safetensors: tensor {NORM} has shape \[63\], expected \[64\]",
        ),
        (
            lambda t: t.update({NORM: torch.ones(64, dtype=torch.int32)}),
            f"tensor {NORM} is int32, expected float32 or float16 or bfloat16 or float64",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.ones(96)}),
            r"up_proj.weight has shape \[96\], expected \[96, 64\]",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
            "tensors that the llama decoder does not use, such as model.layers.0.self_attn.q_proj",
        ),
        (lambda t: t[NORM].fill_(float("nan")), f"tensor {NORM} holds NaN or infinite values"),
        (lambda t: t["lm_head.weight"][3].fill_(float("inf")), "lm_head.weight holds NaN or inf"),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)}),
            "tensor lm_head.weight_scale is missing",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}),
            "tensor lm_head.weight_scale is missing",
        ),
    ],
)
def test_wrong_tensors(copy: Path, edit: Callable[[Any], object], message: str) -> None:
    file = copy / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)
    refuses(copy, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported, only llama, mistral"),
        ({"model_type": None}, "config.json: model_type is missing"),
        ({"num_hidden_layers": 2}, "tensor model.layers.1.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected an integer in"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, expected an integer"),
        ({"hidden_size": 2**40}, "hidden_size is 1099511627776, expected an integer in"),
        ({"hidden_size": 2**20}, r"embed_tokens.weight has shape \[40, 64\], expected \[40, 1048"),
        ({"vocab_size": 0}, "vocab_size is 0, expected an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "not a multiple of num_kv_heads 3"),
        ({"head_dim": 15}, "head_dim is 15, but rotary embedding needs it even"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', expected a number"),
        ({"rms_norm_eps": -1}, "rms_eps is -1.0, expected a positive number"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu', supported is only 'silu'"),
        ({"attention_bias": True}, "attention_bias is True, supported is only False"),
        ({"mlp_bias": True}, "mlp_bias is True, supported is only False"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected true or false"),
        ({"rope_parameters": [1]}, "rope_parameters is .1., expected an object"),
        ({"rope_parameters": {"rope_type": "magic"}}, "rope type 'magic' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is missing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor is 0.0, expected a"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 10**400}},
            "beyond all floating point numbers",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}},
            "short_factors has 1 entries, expected 8",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": ["x"]}},
            "short_factor is ..x.., expected a list of numbers",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 3}}, "partial_rotary_factor is 3.0"),
        ({"model_type": "qwen2", "layer_types": ["x"], "use_sliding_window": True}, "layer_types"),
        (
            {"model_type": "qwen3", "layer_types": 3, "use_sliding_window": True},
            "layer_types is no",
        ),
        (
            {
                "model_type": "qwen3",
                "layer_types": ["sliding_attention"] * 3,
                "use_sliding_window": True,
                "sliding_window": 4,
            },
            "layer_types has 3 entries, expected 1",
        ),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0.0"),
    ],
)
def test_wrong_configurations(copy: Path, changes: dict[str, Any], message: str) -> None:
    file = copy / "config.json"
    config = json.loads(file.read_text())
    config.pop("layer_types", None)
    file.write_text(json.dumps(config | changes))
    refuses(copy, message)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "\ud83d", '{"a": ' * 50_000, "1" * 5000]
)
def test_configuration_that_is_not_a_json_object(copy: Path, content: str) -> None:
    (copy / "config.json").write_bytes(content.encode("utf-8", errors="surrogatepass"))
    refuses(copy, "config.json: not (sound JSON|a JSON object)")


def test_huge_json_is_rejected_unread(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(2**31)
    with pytest.raises(ModelLoadError, match="larger than"):
        read_json(path)


def test_missing_files(tmp_path: Path) -> None:
    refuses(tmp_path, "holds no config.json")
    (tmp_path / "config.json").mkdir()
    refuses(tmp_path, "config.json: cannot be read")


# --- shards ---------------------------------------------------------------------------------------


@pytest.fixture
def shards(copy: Path) -> Path:
    """``copy`` in two shards, a.safetensors and b.safetensors."""
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, copy / file)
    write_index(copy, {name: file for file, part in parts.items() for name in part})
    return copy


def write_index(directory: Path, weight_map: Any) -> None:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(text)


def index_of(directory: Path) -> dict[str, str]:
    text = (directory / "model.safetensors.index.json").read_text()
    weight_map: dict[str, str] = json.loads(text)["weight_map"]
    return weight_map


def test_shards_are_read(shards: Path, sound: Path) -> None:
    with open_hf_model(shards) as ours, open_hf_model(sound) as theirs:
        assert torch.equal(ours.weights["layers.0.query"], theirs.weights["layers.0.query"])


@pytest.mark.parametrize(
    "name",
    [
        "../b.safetensors",
        "/etc/b.safetensors",
        "sub/b.safetensors",
        "..\\b.safetensors",
        "..",
        "",
        "b.bin",
        ".safetensors/",
        3,
        None,
    ],
)
def test_index_may_only_name_files_of_the_directory(shards: Path, name: Any) -> None:
    outside = shards / "sub"
    outside.mkdir()
    (outside / "b.safetensors").write_bytes((shards / "b.safetensors").read_bytes())
    weight_map: dict[str, Any] = index_of(shards)
    weight_map[NORM] = name
    write_index(shards, weight_map)
    refuses(shards, "expected the plain name of a .safetensors file in the same directory")


def test_wrong_indices(shards: Path) -> None:
    weight_map = index_of(shards)
    for wrong in ({}, [], None, "x"):
        write_index(shards, wrong)
        refuses(shards, "weight_map is not an object with entries")
    write_index(shards, weight_map | {NORM: "absent.safetensors"})
    refuses(shards, "absent.safetensors: cannot be read")
    write_index(shards, weight_map | {"extra": "a.safetensors"})
    refuses(shards, "tensor extra is missing")
    write_index(shards, weight_map | {NORM: "b" if weight_map[NORM][0] == "a" else "a"})
    refuses(shards, "expected the plain name")
    other = "b.safetensors" if weight_map[NORM][0] == "a" else "a.safetensors"
    write_index(shards, weight_map | {NORM: other})
    refuses(shards, f"places tensor {NORM} in {other}, but it is in {weight_map[NORM]}")
    write_index(shards, {f"t{n}": f"s{n}.safetensors" for n in range(1001)})
    refuses(shards, "more than 1000 files")


def test_a_tensor_in_two_shards_is_rejected(shards: Path) -> None:
    tensors = load_file(shards / "a.safetensors") | load_file(shards / "b.safetensors")
    save_file(tensors, shards / "b.safetensors")
    refuses(shards, "is in a.safetensors and in b.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_never_read(copy: Path, name: str) -> None:
    (copy / "model.safetensors").rename(copy / name)
    refuses(copy, f"{name} is a pickle, which can run any program .* convert the model")
    with pytest.raises(ModelLoadError, match="is a pickle by its name"), open_weights(copy / name):
        pass


def test_no_weights_at_all(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "other.safetensors")
    refuses(copy, "has neither model.safetensors nor model.safetensors.index.json")
    with (
        pytest.raises(ModelLoadError, match="give its directory"),
        open_weights(copy / "other.safetensors"),
    ):
        pass


def test_names(copy: Path) -> None:
    assert model_name(Path("/x/models--org--name/snapshots/0123abc")) == "org/name"
    assert model_name(copy) == copy.name
    assert model_name(Path("/x/a.b.gguf")) == "a.b"


# --- fuzzing --------------------------------------------------------------------------------------

FUZZ = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
INTERESTING = [0, 1, ord('"'), ord("0"), ord("9"), ord("-"), ord("{"), ord("]"), 0x7F, 0x80, 0xFF]


@FUZZ
@given(data=st.data())
def test_damaged_safetensors_load_or_raise_model_load_error(
    copy: Path, sound: Path, data: Any
) -> None:
    """Any few bytes changed, most in the header: a model or a ModelLoadError, nothing else."""
    damaged = bytearray((sound / "model.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.one_of(st.integers(0, 1100), st.integers(0, len(damaged) - 1)))
        damaged[position] = data.draw(st.sampled_from(INTERESTING))
    (copy / "model.safetensors").write_bytes(damaged)
    try:
        with open_hf_model(copy) as model:
            assert len(dict(model.weights)) > 5
    except ModelLoadError as error:
        assert str(error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


@FUZZ
@given(data=st.data())
def test_arbitrary_settings_load_or_raise_model_load_error(
    copy: Path, sound: Path, data: Any
) -> None:
    config = json.loads((sound / "config.json").read_text())
    families = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"]
    config["model_type"] = data.draw(st.sampled_from(families))
    extra = ("quantization_config", "layer_types", "rope_scaling", "sliding_window", "head_dim")
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from([*config, *extra]))
        config[key] = data.draw(JSON)
    (copy / "config.json").write_text(json.dumps(config))
    try:
        with open_hf_model(copy) as model:
            assert model.config.num_layers == 1
    except ModelLoadError as error:
        assert str(error)


def test_mapped_tensor_is_copy_on_write(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    values = {"a": torch.arange(12.0).view(3, 4), "b": torch.tensor([1, -2], dtype=torch.int8)}
    write_safetensors(path, values | {"none": torch.empty(0, 3)})
    before = path.read_bytes()
    with SafetensorsFile(path) as file:
        mapped = {name: file.mapped(name) for name in ("a", "b", "none")}
    for name, value in values.items():
        assert torch.equal(mapped[name], value)  # the file is closed: they stay valid
    assert mapped["none"].shape == (0, 3)
    mapped["a"][1] = 7.0
    assert path.read_bytes() == before
