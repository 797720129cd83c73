"""GGUF files: round trips with the gguf package, and rejection of broken files."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_core.errors import ModelLoadError
from llm_core.loading.gguf.config import read_config
from llm_core.loading.gguf.container import GgufFile, read_metadata
from llm_core.loading.gguf.model import open_gguf_model
from llm_core.loading.weights import weight_shapes
from llm_core.quant.formats import to_float
from tests.support.random_llama import random_weights, tiny_config

FILE_NAMES = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "attention_norm": "attn_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "attention_output": "attn_output",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
CONFIG = tiny_config(num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, vocab_size=40)
Q = gguf.GGMLQuantizationType


def file_name(name: str) -> str:
    if name in FILE_NAMES:
        return FILE_NAMES[name]
    _, layer, part = name.split(".")
    return f"blk.{layer}.{FILE_NAMES[part]}.weight"


def write(
    path: Path,
    *,
    kind: gguf.GGMLQuantizationType = Q.F32,
    edit_tensors: Callable[[dict[str, np.ndarray[Any, Any]]], object] = lambda tensors: None,
    edit_metadata: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    architecture: str = "llama",
) -> Path:
    """A tiny model; matrices stored as ``kind``. The editors may change what is written."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(CONFIG.context_len)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_block_count(CONFIG.num_layers)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_heads)
    writer.add_head_count_kv(CONFIG.num_kv_heads)
    writer.add_rope_freq_base(123.0)
    writer.add_layer_norm_rms_eps(1e-3)
    writer.add_token_list(["a", "é", "Ġ", ""])
    writer.add_token_types([1, 1, 3, 1])
    writer.add_bool("a.flag", True)
    writer.add_float64("a.double", 0.1)
    writer.add_int8("a.byte", -3)
    tensors = {file_name(k): v.numpy() for k, v in random_weights(CONFIG).items()}
    edit_metadata(writer)
    edit_tensors(tensors)
    for name, values in tensors.items():
        if values.ndim == 2 and values.dtype == np.float32 and kind != Q.F32:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def overwrite_key(key: str, value: Any, kind: gguf.GGUFValueType) -> Callable[[Any], None]:
    def edit(writer: gguf.GGUFWriter) -> None:
        for group in writer.kv_data:
            group.pop(key, None)
        writer.add_key_value(key, value, kind)

    return edit


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("gguf") / "sound.gguf").read_bytes()


def refuses(path: Path, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message), open_gguf_model(path):
        pass


def test_metadata_is_plain_values(tmp_path: Path) -> None:
    metadata = read_metadata(write(tmp_path / "m.gguf"))
    assert metadata["general.architecture"] == "llama"
    assert metadata["tokenizer.ggml.tokens"] == ["a", "é", "Ġ", ""]
    assert metadata["tokenizer.ggml.token_type"].tolist() == [1, 1, 3, 1]
    assert metadata["llama.block_count"] == 1
    assert isinstance(metadata["llama.block_count"], int)
    assert metadata["a.flag"] is True
    assert (metadata["a.double"], metadata["a.byte"]) == (0.1, -3)


def test_config(tmp_path: Path) -> None:
    with GgufFile(write(tmp_path / "m.gguf")) as file:
        config = read_config(file)
    assert (config.num_layers, config.hidden_size, config.head_dim) == (1, 32, 16)
    assert (config.rope_theta, config.vocab_size, config.tie_embeddings) == (123.0, 40, False)
    assert config.rms_eps == pytest.approx(1e-3)


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1])
def test_weights_equal_the_gguf_packages(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    path = write(tmp_path / "m.gguf", kind=kind)
    expected = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }
    with open_gguf_model(path) as model:
        assert set(model.weights) == set(weight_shapes(model.config))
        weights = dict(model.weights)
    for name, weight in weights.items():  # after the file was closed: they are copies
        values = torch.from_numpy(expected[file_name(name)].astype(np.float32))
        assert torch.equal(to_float(weight), values), name


def test_missing_head_is_tied(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", edit_tensors=lambda t: t.pop("output.weight"))
    with open_gguf_model(path) as model:
        assert model.config.tie_embeddings
        assert "head" not in model.weights


def test_every_truncation_is_rejected(tmp_path: Path, sound: bytes) -> None:
    """Cut after each byte of the header, and in the data."""
    with GgufFile(write(tmp_path / "m.gguf")) as file:
        data_start = min(info.offset for info in file.tensors.values())
    path = tmp_path / "cut.gguf"
    for length in [*range(1, data_start, 3), data_start, data_start + 1000]:
        path.write_bytes(sound[:length])
        refuses(path, "cut.gguf: (truncated|.* more than the rest of the file can hold)")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"GG", "truncated: the magic number"),
        (b"PK\x03\x04" + bytes(100), "wrong magic number"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian GGUF is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "tensor count is 1152921504606846976"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "metadata count is 9223372036854775808"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "general.architecture is missing"),
    ],
)
def test_wrong_headers(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    refuses(path, message)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    refuses(tmp_path / "absent.gguf", "absent.gguf: cannot be read")
    refuses(tmp_path, "cannot be read")


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


ARRAY, STRING, UINT8, UINT32 = 9, 8, 0, 4


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry(b"k", STRING, struct.pack("<Q", 2**63))], "truncated: k needs 9223372036854775808"),
        ([entry(b"k", ARRAY, struct.pack("<IQ", UINT8, 2**61))], "k is 2305843009213693952, more"),
        ([entry(b"k", ARRAY, struct.pack("<IQ", STRING, 2**61))], "k is 2305843009213693952, more"),
        ([entry(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1))], "unsupported type number 9"),
        ([entry(b"k", 77, b"\0")], "'k' has unsupported type number 77"),
        ([entry(b"k", STRING, text(b"\xff\xfe"))], "k is not UTF-8 text"),
        ([entry(b"\xff", UINT8, b"\0")], "a metadata key is not UTF-8 text"),
        ([entry(b"k", UINT8, b"\0")] * 2, "metadata key 'k' occurs twice"),
        ([struct.pack("<Q", 2**64 - 1)], "truncated: a metadata key"),
    ],
)
def test_absurd_metadata(tmp_path: Path, entries: list[bytes], message: str) -> None:
    """Refused by what the file can hold, before memory is asked for."""
    path = tmp_path / "x.gguf"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries))
    path.write_bytes(header + b"".join(entries) + bytes(64))
    tracemalloc.start()
    refuses(path, message)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1_000_000


@pytest.mark.parametrize(
    "begun",
    [
        entry(b"k", STRING, struct.pack("<Q", 2**31)),
        entry(b"k", ARRAY, struct.pack("<IQ", UINT8, 2**31)),
        # Strings of no characters, 200 million of them: there is room, but not for their list.
        entry(b"k", ARRAY, struct.pack("<IQ", STRING, 200_000_000)),
        struct.pack("<Q", 2**31),
    ],
)
def test_two_gigabyte_header_is_rejected_unread(tmp_path: Path, begun: bytes) -> None:
    path = tmp_path / "x.gguf"
    with path.open("wb") as file:  # sparse: takes no room on disk
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + begun)
        file.truncate(3 << 30)
    tracemalloc.start()
    refuses(path, "at most 67108864 are accepted before the tensors")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1_000_000


def tensor(dims: tuple[int, ...], kind: int = 0, offset: int = 0, name: bytes = b"t") -> bytes:
    return (
        text(name)
        + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        + struct.pack("<IQ", kind, offset)
    )


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([tensor((2**40, 2**40))], "truncated: tensor t ends at byte"),
        ([tensor((4,), offset=2**63)], "truncated: tensor t ends at byte"),
        ([tensor((4, 0))], "tensor t has dimensions .4, 0., expected positive"),
        ([tensor((33, 2), kind=Q.Q4_1)], "multiple of 32 .Q4_1"),
        ([tensor((4,), kind=999)], "tensor t has unknown format number 999"),
        ([tensor((1,) * 5)], "tensor t has 5 dimensions"),
        ([tensor(()) + bytes(16)], "tensor t has 0 dimensions"),
        ([tensor((4,))] * 2, "tensor t occurs twice"),
    ],
)
def test_absurd_tensors(tmp_path: Path, tensors: list[bytes], message: str) -> None:
    path = tmp_path / "x.gguf"
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 0)
    path.write_bytes(header + b"".join(tensors) + bytes(256))
    refuses(path, message)


@pytest.mark.parametrize("alignment", [0, 3, -32])
def test_wrong_alignment(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "x.gguf"
    metadata = entry(b"general.alignment", 5, struct.pack("<i", alignment))
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + metadata)
    refuses(path, f"general.alignment is {alignment}, expected a power of two")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("blk.0.ffn_up.weight"), "tensor blk.0.ffn_up.weight is missing"),
        (lambda t: t.pop("token_embd.weight"), "tensor token_embd.weight is missing"),
        (lambda t: t.pop("output_norm.weight"), "tensor output_norm.weight is missing"),
        (
            lambda t: t.update({"blk.0.attn_k.weight": t["blk.0.attn_q.weight"]}),
            r"tensor blk.0.attn_k.weight has shape \[32, 32\], expected \[16, 32\]",
        ),
        (
            lambda t: t.update({"output.weight": t["output.weight"][:, 0].copy()}),
            r"tensor output.weight has shape \[40\], expected \[40, 32\]",
        ),
        (
            lambda t: t.update({"output_norm.weight": np.ones(32, np.int32)}),
            "tensor output_norm.weight of shape .32. has format I32, supported are F32",
        ),
        (
            lambda t: t.update({"blk.0.attn_q.bias": np.ones(32, np.float32)}),
            "tensors that the llama decoder does not use, such as blk.0.attn_q.bias",
        ),
        (
            lambda t: t.update({"rope_freqs.weight": np.ones(7, np.float32)}),
            r"tensor rope_freqs.weight has shape \[7\], expected \[8\]",
        ),
        (
            lambda t: t.update({"rope_factors_long.weight": np.ones(8, np.float32)}),
            "does not use, such as rope_factors_long.weight",
        ),
        (
            lambda t: t.update({"rope_freqs.weight": np.zeros(8, np.float32)}),
            "factors is 0.0, expected a positive number",
        ),
    ],
)
def test_wrong_tensors(tmp_path: Path, edit: Callable[[Any], object], message: str) -> None:
    refuses(write(tmp_path / "m.gguf", edit_tensors=edit), message)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_1])
def test_values_that_are_not_finite_are_rejected(
    tmp_path: Path, kind: gguf.GGMLQuantizationType, value: float
) -> None:
    """As a value, or as the scale of a block."""
    path = write(tmp_path / "m.gguf", kind=kind)
    with GgufFile(path) as file:
        offset = file.tensors["blk.0.ffn_up.weight"].offset
    raw = {Q.F32: np.float32(value), Q.BF16: np.float32(value)}.get(kind, np.float16(value))
    content = bytearray(path.read_bytes())
    written = raw.tobytes()[2:] if kind == Q.BF16 else raw.tobytes()
    content[offset : offset + len(written)] = written
    path.write_bytes(content)
    with (
        pytest.raises(ModelLoadError, match="tensor blk.0.ffn_up.weight.* NaN or infinite"),
        open_gguf_model(path) as model,
    ):
        dict(model.weights)


def test_unsupported_quantisation_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", kind=Q.MXFP4)
    refuses(path, "has format MXFP4, supported are F32, F16, BF16 and for matrices Q4_0, Q4_1, ")


U32, F32, TEXT = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32, gguf.GGUFValueType.STRING


@pytest.mark.parametrize(
    ("key", "value", "kind", "message"),
    [
        ("llama.block_count", 2, U32, "tensor blk.1.attn_norm.weight is missing"),
        (
            "llama.block_count",
            2**32 - 1,
            U32,
            "block_count is 4294967295, expected an integer in 1",
        ),
        ("llama.block_count", 0, U32, "block_count is 0, expected an integer"),
        ("llama.embedding_length", 2**31, U32, "embedding_length is 2147483648, expected"),
        ("llama.embedding_length", 1, U32, "head_count|key_length is 0"),
        ("llama.context_length", 2**32 - 1, U32, "context_length is 4294967295, expected"),
        (
            "llama.vocab_size",
            41,
            U32,
            r"token_embd.weight has shape \[40, 32\], expected \[41, 32\]",
        ),
        ("llama.attention.head_count", 0, U32, "head_count is 0"),
        ("llama.attention.head_count", "two", TEXT, "head_count is 'two', expected an integer"),
        ("llama.attention.head_count_kv", 3, U32, "not a multiple of num_kv_heads 3"),
        ("llama.attention.key_length", 7, U32, "head_dim is 7, but rotary embedding needs it even"),
        ("llama.attention.value_length", 8, U32, "value_length is 8, supported is only 16"),
        ("llama.rope.dimension_count", 8, U32, "dimension_count is 8, supported is only 16"),
        ("llama.rope.freq_base", float("nan"), F32, "rope_theta is nan, expected a positive"),
        (
            "llama.rope.scaling.type",
            "su",
            TEXT,
            "scaling.factor is missing",
        ),
        ("llama.expert_count", 8, U32, "expert_count is 8, supported is only 0"),
        ("general.architecture", "mamba", TEXT, "architecture 'mamba' is not supported"),
    ],
)
def test_wrong_configuration(
    tmp_path: Path, key: str, value: Any, kind: gguf.GGUFValueType, message: str
) -> None:
    refuses(write(tmp_path / "m.gguf", edit_metadata=overwrite_key(key, value, kind)), message)


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_damaged_headers_load_or_raise_model_load_error(
    tmp_path: Path, sound: bytes, data: st.DataObject
) -> None:
    """Any few bytes of the header changed: a model or a ModelLoadError, nothing else."""
    damaged = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, 1500))
        damaged[position] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        with open_gguf_model(path) as model:
            assert model.config.num_layers >= 1
    except ModelLoadError as error:
        assert "damaged.gguf" in str(error)
