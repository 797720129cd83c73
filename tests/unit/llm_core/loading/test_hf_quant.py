"""Quantised checkpoints: packed here number by number as the formats are published, read by the
loader, and compared with a dequantisation written here number by number too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from llm_core.errors import ModelLoadError
from llm_core.loading.hf.model import open_hf_model
from llm_core.loading.weights import interleaved
from llm_core.quant.formats import GroupedCodes, to_float
from tests.support.hf_models import our_logits, random_ids, save_model, their_logits

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
Tensors = dict[str, torch.Tensor]


def word(codes: list[int], bits: int) -> int:
    """Codes in one int32, the first in the lowest bits."""
    value = sum(code << (bits * i) for i, code in enumerate(codes))
    return value - (1 << 32) if value >= 1 << 31 else value


def packed_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[A, B] -> int32 [A / per, B]: neighbours down a column share a word."""
    per = 32 // bits
    rows = codes.tolist()
    return torch.tensor(
        [
            [word([rows[a + i][b] for i in range(per)], bits) for b in range(len(rows[0]))]
            for a in range(0, len(rows), per)
        ],
        dtype=torch.int32,
    )


def packed_columns(codes: torch.Tensor, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """[A, B] -> int32 [A, B / per]: neighbours along a row share a word, rounded up."""
    per = 32 // bits
    order = order or list(range(per))
    rows = [row + [0] * (-len(row) % per) for row in codes.tolist()]
    return torch.tensor(
        [[word([r[b + o] for o in order], bits) for b in range(0, len(r), per)] for r in rows],
        dtype=torch.int32,
    )


class Case:
    """Random codes, zeros and scales for every linear layer of a Llama, packed by ``pack``."""

    def __init__(self, bits: int, group: int, *, symmetric: bool, act_order: bool = False) -> None:
        self.bits, self.group = bits, group
        self.symmetric, self.act_order = symmetric, act_order
        self.generator = torch.Generator().manual_seed(bits + group + act_order)

    def random(self, top: int, *shape: int) -> torch.Tensor:
        return torch.randint(top, shape, generator=self.generator)

    def make(self, num_out: int, num_in: int) -> dict[str, torch.Tensor]:
        """codes [N, K], zeros and scales [N, G], index [K], and the values they mean."""
        group = num_in if self.group == -1 else self.group
        num_groups = num_in // group
        codes = self.random(1 << self.bits, num_out, num_in)
        zeros = self.random((1 << self.bits) - 1, num_out, num_groups) + 1
        if self.symmetric:
            zeros = torch.full_like(zeros, 1 << (self.bits - 1))
        step = 0.5 / num_in**0.5 / (1 << (self.bits - 1))
        scales = (step * (0.5 + torch.rand(num_out, num_groups, generator=self.generator))).half()
        index = torch.arange(num_in) // group
        if self.act_order:
            index = index[torch.randperm(num_in, generator=self.generator)]
        values = torch.empty(num_out, num_in)
        for k in range(num_in):
            g = int(index[k])
            values[:, k] = (codes[:, k] - zeros[:, g]).float() * scales[:, g].float()
        return {"codes": codes, "zeros": zeros, "scales": scales, "index": index, "values": values}


def gptq(parts: Tensors, bits: int, less: int, *, with_index: bool = True) -> Tensors:
    zeros = (parts["zeros"].T - less) % (1 << bits)
    tensors = {
        "qweight": packed_rows(parts["codes"].T, bits),
        "qzeros": packed_columns(zeros, bits),
        "scales": parts["scales"].T.contiguous(),
    }
    return tensors | ({"g_idx": parts["index"].int()} if with_index else {})


def awq(parts: Tensors) -> Tensors:
    return {
        "qweight": packed_columns(parts["codes"].T, 4, AWQ_ORDER),
        "qzeros": packed_columns(parts["zeros"].T, 4, AWQ_ORDER),
        "scales": parts["scales"].T.contiguous(),
    }


def compressed(parts: Tensors, bits: int, *, symmetric: bool) -> Tensors:
    tensors = {
        "weight_packed": packed_columns(parts["codes"], bits),
        "weight_scale": parts["scales"],
        "weight_shape": torch.tensor(parts["codes"].shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = packed_columns(parts["zeros"].T, bits).T.contiguous()
    return tensors


def int8(parts: Tensors) -> Tensors:
    return {
        "weight": (parts["codes"] - 128).to(torch.int8),
        "weight_scale": parts["scales"],
        "weight_zero_point": (parts["zeros"] - 128).to(torch.int8),
    }


def write(
    directory: Path, case: Case, pack: Callable[[Tensors], Tensors], config: dict[str, Any]
) -> tuple[Any, Tensors]:
    """A tiny Llama whose linear layers are quantised; transformers' model of the values; them."""
    model = save_model(directory, "llama", num_hidden_layers=2)
    file = directory / "model.safetensors"
    tensors, values = load_file(file), {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        num_out, num_in = tensors.pop(name).shape
        parts = case.make(num_out, num_in)
        base = name.removesuffix(".weight")
        tensors |= {f"{base}.{part}": tensor for part, tensor in pack(parts).items()}
        values[base] = parts["values"]
        model.get_submodule(base).weight.data.copy_(parts["values"])
    save_file(tensors, file)
    settings = json.loads((directory / "config.json").read_text())
    settings["quantization_config"] = config
    (directory / "config.json").write_text(json.dumps(settings))
    return model, values


def check(directory: Path, model: Any, values: Tensors, *, grouped: bool, bits: int) -> None:
    with open_hf_model(directory) as opened:
        up = opened.weights["layers.1.up"]
        assert torch.equal(to_float(up), values["model.layers.1.mlp.up_proj"])
        query = opened.weights["layers.0.query"]
        rows = interleaved(4, 16, 16)
        assert torch.equal(to_float(query), values["model.layers.0.self_attn.q_proj"][rows])
        assert isinstance(up, GroupedCodes) == isinstance(query, GroupedCodes) == grouped
        if isinstance(up, GroupedCodes):
            assert up.bits == bits
    ids = random_ids(101, 20)
    torch.testing.assert_close(
        our_logits(directory, ids), their_logits(model, ids), atol=5e-5, rtol=5e-5
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, -1])
def test_gptq(tmp_path: Path, bits: int, version: str, symmetric: bool, group: int) -> None:
    case = Case(bits, group, symmetric=symmetric)
    less = 1 if version == "gptq" else 0
    config = {"quant_method": "gptq", "bits": bits, "group_size": group}
    config["checkpoint_format"] = version
    model, values = write(tmp_path, case, lambda parts: gptq(parts, bits, less), config)
    check(tmp_path, model, values, grouped=True, bits=bits)


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_act_order(tmp_path: Path, bits: int) -> None:
    """Groups that are not neighbours have no grouped form: exact, but in floats."""
    case = Case(bits, 32, symmetric=False, act_order=True)
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": True}
    model, values = write(tmp_path, case, lambda parts: gptq(parts, bits, 1), config)
    check(tmp_path, model, values, grouped=False, bits=bits)


def test_gptq_zero_point_of_zero(tmp_path: Path) -> None:
    """The old format stores it as all ones: it counts modulo 16."""
    case = Case(4, 32, symmetric=True)
    make = case.make

    def with_zero(num_out: int, num_in: int) -> Tensors:
        parts = make(num_out, num_in)
        parts["zeros"] = torch.zeros_like(parts["zeros"])
        scales = parts["scales"].float().repeat_interleave(32, 1)
        return parts | {"values": parts["codes"].float() * scales}

    case.make = with_zero  # type: ignore[method-assign]
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    model, values = write(tmp_path, case, lambda parts: gptq(parts, 4, 1), config)
    check(tmp_path, model, values, grouped=True, bits=4)


def test_old_gptq_settings_file(tmp_path: Path) -> None:
    case = Case(4, 32, symmetric=False)
    model, values = write(tmp_path, case, lambda p: gptq(p, 4, 1, with_index=False), {})
    with (
        pytest.raises(ModelLoadError, match="needs a quantization_config"),
        open_hf_model(tmp_path),
    ):
        pass
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 32}')
    check(tmp_path, model, values, grouped=True, bits=4)


def test_gptq_zero_biases_are_ignored(tmp_path: Path) -> None:
    def pack(parts: Tensors) -> Tensors:
        return gptq(parts, 4, 1) | {"bias": torch.zeros(parts["codes"].shape[0]).half()}

    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    model, values = write(tmp_path, Case(4, 32, symmetric=True), pack, config)
    check(tmp_path, model, values, grouped=True, bits=4)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.bias"][3] = 1
    save_file(tensors, file)
    with (
        pytest.raises(ModelLoadError, match=r"does not use, such as model.layers.0.mlp.up_proj.b"),
        open_hf_model(tmp_path),
    ):
        pass


@pytest.mark.parametrize("group", [32, -1])
def test_awq(tmp_path: Path, group: int) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    config["zero_point"] = True
    model, values = write(tmp_path, Case(4, group, symmetric=False), awq, config)
    check(tmp_path, model, values, grouped=True, bits=4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, -1])
def test_compressed_tensors(tmp_path: Path, bits: int, symmetric: bool, group: int) -> None:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
    }
    case = Case(bits, group, symmetric=symmetric)
    model, values = write(
        tmp_path, case, lambda parts: compressed(parts, bits, symmetric=symmetric), config
    )
    check(tmp_path, model, values, grouped=True, bits=bits)


def test_int8(tmp_path: Path) -> None:
    config = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    model, values = write(tmp_path, Case(8, -1, symmetric=False), int8, config)
    check(tmp_path, model, values, grouped=True, bits=8)


@pytest.mark.parametrize("shape", ["one", "scalar", "rows", "row_column", "blocks"])
def test_fp8(tmp_path: Path, shape: str) -> None:
    """Scales of a tensor, of each row, and of blocks of 32 x 32."""

    def pack(parts: Tensors) -> Tensors:
        codes = (parts["codes"] - 8.0).to(torch.float8_e4m3fn)
        num_out, num_in = codes.shape
        grids = {
            "one": (1,),
            "scalar": (),
            "rows": (num_out,),
            "row_column": (num_out, 1),
            "blocks": (num_out // 32, num_in // 32),
        }
        scale = 0.01 + 0.02 * torch.rand(grids[shape])
        full = torch.empty(num_out, num_in)
        for n in range(num_out):
            for k in range(num_in):
                if shape in ("one", "scalar"):
                    full[n, k] = scale.reshape(1)[0]
                elif shape == "blocks":
                    full[n, k] = scale[n // 32, k // 32]
                else:
                    full[n, k] = scale.reshape(-1)[n]
        parts["values"] = codes.float() * full
        name = "weight_scale_inv" if shape == "blocks" else "weight_scale"
        return {"weight": codes, name: scale, "input_scale": torch.ones(1)}

    config = {"quant_method": "fp8"}
    case = Case(4, 32, symmetric=True)
    model, values = write(tmp_path, case, pack, config)
    check(tmp_path, model, values, grouped=False, bits=8)


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{UP}.scales"), f"tensor {UP}.scales is missing"),
        (lambda t: t.pop(f"{UP}.qzeros"), f"tensor {UP}.qzeros is missing"),
        (
            lambda t: t.update({f"{UP}.qweight": t[f"{UP}.qweight"][1:].clone()}),
            rf"tensor {UP}.qweight has shape \[7, 96\], expected \[8, 96\]",
        ),
        (
            lambda t: t.update({f"{UP}.qweight": t[f"{UP}.qweight"].long()}),
            f"tensor {UP}.qweight is int64, expected int32",
        ),
        (
            lambda t: t.update({f"{UP}.scales": torch.rand(3, 96).half()}),
            rf"tensor {UP}.scales has shape \[3, 96\], expected two .* divides 64 inputs",
        ),
        (
            lambda t: t.update({f"{UP}.scales": torch.rand(0, 96).half()}),
            "a number of groups that divides 64 inputs",
        ),
        (
            lambda t: t[f"{UP}.scales"].fill_(float("nan")),
            f"tensor {UP}.scales holds NaN or infinite values",
        ),
        (lambda t: t[f"{UP}.g_idx"].fill_(2), "names groups outside 0 to 1"),
        (lambda t: t[f"{UP}.g_idx"].fill_(-1), "names groups outside 0 to 1"),
    ],
)
def test_wrong_gptq_tensors(tmp_path: Path, edit: Callable[[Any], object], message: str) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    write(tmp_path, Case(4, 32, symmetric=True), lambda parts: gptq(parts, 4, 1), config)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=message), open_hf_model(tmp_path) as opened:
        assert opened.weights["layers.0.up"] is not None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3, supported is only 4 or 8"),
        ({"quant_method": "gptq"}, "bits is missing"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "is 'marlin', supp"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv', supported is"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format is 'marlin-24'"),
        ({"quant_method": 3}, "quant_method is 3, expected text"),
        ([], "quantization_config is .., expected an object"),
    ],
)
def test_wrong_settings(tmp_path: Path, config: Any, message: str) -> None:
    save_model(tmp_path, "llama")
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    with pytest.raises(ModelLoadError, match=message), open_hf_model(tmp_path):
        pass


# --- every stored form, damaged -------------------------------------------------------------------


def fp8(parts: Tensors) -> Tensors:
    codes = (parts["codes"] - 8.0).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": torch.full((codes.shape[0], 1), 0.01)}


FORMS: dict[str, tuple[Case, Callable[[Tensors], Tensors], dict[str, Any]]] = {
    "gptq": (
        Case(4, 32, symmetric=False),
        lambda parts: gptq(parts, 4, 1),
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
    ),
    "awq": (
        Case(4, 32, symmetric=False),
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    ),
    "packed": (
        Case(4, 32, symmetric=False),
        lambda parts: compressed(parts, 4, symmetric=False),
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
        },
    ),
    "int8": (
        Case(8, -1, symmetric=False),
        int8,
        {"quant_method": "compressed-tensors", "format": "int-quantized"},
    ),
    "fp8": (Case(4, 32, symmetric=True), fp8, {"quant_method": "fp8"}),
}
SCALES = {"gptq": "scales", "awq": "scales", "packed": "weight_scale", "int8": "weight_scale"}


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sound directory of each form."""
    result = {}
    for name, (case, pack, config) in FORMS.items():
        result[name] = tmp_path_factory.mktemp(name)
        write(result[name], case, pack, config)
    return result


def damaged(sound: Path, target: Path, edit: Callable[[Tensors], object]) -> Path:
    tensors = load_file(sound / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_bytes((sound / "config.json").read_bytes())
    return target


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_not_finite(
    forms: dict[str, Path], tmp_path: Path, form: str, value: float
) -> None:
    name = f"{UP}.{SCALES.get(form, 'weight_scale')}"
    directory = damaged(forms[form], tmp_path, lambda t: t[name].view(-1)[3:4].fill_(value))
    with (
        pytest.raises(ModelLoadError, match=f"tensor {name} holds NaN or infinite values"),
        open_hf_model(directory) as opened,
    ):
        dict(opened.weights)


def test_fp8_nan_codes(forms: dict[str, Path], tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[f"{UP}.weight"].view(torch.uint8)[2, 3] = 0x7F

    directory = damaged(forms["fp8"], tmp_path, edit)
    with pytest.raises(ModelLoadError, match="up_proj.weight holds NaN"):  # noqa: SIM117
        with open_hf_model(directory) as opened:
            dict(opened.weights)


@pytest.mark.parametrize("form", FORMS)
def test_missing_or_misshapen_parts_are_named(
    forms: dict[str, Path], tmp_path: Path, form: str
) -> None:
    names = [n for n in load_file(forms[form] / "model.safetensors") if n.startswith(UP)]
    # What may be left out: an index that says nothing new, zero points of symmetric codes.
    optional = ("g_idx", "weight_shape", "weight_zero_point")
    assert len(names) > 1
    for name in names:
        edits: list[Callable[[Tensors], object]] = [
            lambda t, n=name: t.update({n: torch.zeros(3, 5, 2, dtype=t[n].dtype)}),  # type: ignore[misc]
        ]
        if not name.endswith(optional):
            edits.append(lambda t, n=name: t.pop(n))  # type: ignore[misc]
        if name.endswith("weight_shape"):
            continue
        for edit in edits:
            directory = damaged(forms[form], tmp_path, edit)
            with pytest.raises(ModelLoadError, match="up_proj"), open_hf_model(directory):
                pass


@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_damage_loads_or_raises_model_load_error(
    forms: dict[str, Path], tmp_path: Path, data: Any
) -> None:
    """Tensors of other shapes, dtypes and numbers: a model or a ModelLoadError, nothing else."""
    form = data.draw(st.sampled_from(sorted(FORMS)))

    def edit(tensors: Tensors) -> None:
        for _ in range(data.draw(st.integers(1, 2))):
            name = data.draw(st.sampled_from(sorted(tensors)))
            old = tensors.pop(name)
            how = data.draw(st.sampled_from(["drop", "dtype", "shape", "turn", "bytes", "rename"]))
            if how == "dtype":
                dtypes = [torch.float32, torch.float16, torch.int8, torch.int32, torch.uint8]
                tensors[name] = old.float().to(data.draw(st.sampled_from(dtypes)))
            elif how == "shape":
                sizes = data.draw(st.lists(st.sampled_from([0, 1, 2, 7, 64, 96]), max_size=3))
                tensors[name] = torch.zeros(sizes, dtype=old.dtype)
            elif how == "turn":
                tensors[name] = old.T.contiguous() if old.ndim == 2 else old[None]
            elif how == "bytes":
                raw = old.clone().flatten().view(torch.uint8)
                at = data.draw(st.integers(0, len(raw) - 1))
                raw[at] = data.draw(st.sampled_from([0, 0x7C, 0x7F, 0x80, 0xFF]))
                tensors[name] = raw.view(old.dtype).view(old.shape)
            elif how == "rename":
                tensors[data.draw(st.sampled_from(["x", f"{UP}.weight", f"{UP}.qweight"]))] = old

    try:
        with open_hf_model(damaged(forms[form], tmp_path, edit)) as opened:
            for weight in opened.weights.values():
                assert bool(to_float(weight).isfinite().all())
    except ModelLoadError as error:
        assert str(error)
