"""Weight matrices of a Hugging Face checkpoint in all supported formats.

The format is recognised by the tensors that exist (``weight``, ``qweight``, ``weight_packed``), so
no list of unquantised layers is needed; ``quantization_config`` has the parameters. All shapes are
checked when the model is opened, before any data is read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, cast

import torch

from llm_core.errors import ModelLoadError
from llm_core.loading.fields import Fields
from llm_core.loading.hf.checkpoint import Checkpoint, read_json
from llm_core.loading.hf.packed import from_awq, from_compressed, from_gptq, from_int8
from llm_core.quant import Bits, Weight

Method = Literal["", "gptq", "awq", "compressed-tensors", "fp8"]
Reader = Callable[[], Weight]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_FP8 = torch.float8_e4m3fn
_OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
# Not used: scales for quantised activations and caches, and redundant shapes.
IGNORED_PARTS = (
    *("input_scale", "output_scale", "input_zero_point", "k_scale", "v_scale", "q_scale"),
    "weight_shape",
)


class QuantSettings:
    """The parsed ``quantization_config``. Raises ModelLoadError for unsupported settings."""

    def __init__(self, config: Fields, directory: Path) -> None:
        fields = config.section("quantization_config")
        method = fields.text("quant_method", "")
        if not method:
            for file_name, name in _OLD_FILES.items():
                if (directory / file_name).exists():
                    method, fields = name, Fields(file_name, read_json(directory / file_name))
                    break
        self.zeros_are_less_one = True
        self.bits: Bits = 4
        self.group_size: int | None = None
        if method == "gptq":
            self.bits = self._bits(fields, "bits")
            fields.forbid_unless("checkpoint_format", "gptq", "gptq_v2")
            self.zeros_are_less_one = fields.text("checkpoint_format", "gptq") == "gptq"
            if fields.get("group_size", -1) != -1:  # -1: a whole row
                self.group_size = fields.integer("group_size")
        elif method == "awq":
            fields.forbid_unless("version", "gemm", "GEMM")
            for key in ("bits", "w_bit"):
                fields.forbid_unless(key, 4)
        elif method == "compressed-tensors":
            self._read_compressed(fields)
        elif method not in ("", "fp8"):
            raise fields.error(
                f"quant_method {method!r:.40} is not supported, only gptq, awq, "
                "compressed-tensors and fp8"
            )
        self.method = cast(Method, method)

    def _read_compressed(self, fields: Fields) -> None:
        fields.forbid_unless(
            "format", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
        )
        groups = fields.section("config_groups")
        found = set()
        for name in fields.raw("config_groups") or {}:
            weights = groups.section(name).section("weights")
            if weights.text("type", "int") == "float":
                weights.forbid_unless("num_bits", 8)
            else:
                found.add(self._bits(weights, "num_bits"))
        if len(found) > 1:
            raise fields.error("config_groups mix weights of 4 and 8 bits, expected one of them")
        self.bits = next(iter(found), 4)

    @staticmethod
    def _bits(fields: Fields, key: str) -> Bits:
        fields.forbid_unless(key, 4, 8)
        return cast(Bits, fields.integer(key))


class MatrixReader:
    """Finds, checks and reads matrices. ``used`` collects the names of the tensors read."""

    def __init__(self, checkpoint: Checkpoint, settings: QuantSettings) -> None:
        self._checkpoint = checkpoint
        self._settings = settings
        self.used: set[str] = set()

    def matrix(self, base: str, shape: tuple[int, int]) -> Reader:
        """A reader for ``base`` [N, K], whose tensors are checked here."""
        if f"{base}.qweight" in self._checkpoint:
            return self._gptq_or_awq(base, shape)
        if f"{base}.weight_packed" in self._checkpoint:
            return self._packed(base, shape)
        name = f"{base}.weight"
        dtype = self._checkpoint.dtype(name)
        if dtype == torch.int8:
            return self._int8(base, shape)
        if dtype == _FP8:
            return self._fp8(base, shape)
        return self.plain(name, shape)

    def plain(self, name: str, shape: tuple[int, ...]) -> Reader:
        """A reader for a floating-point tensor."""
        self._check(name, shape, *_FLOATS)
        return lambda: self._checkpoint.read(name)

    def _check(self, name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
        self._checkpoint.check(name, shape, *dtypes)
        self.used.add(name)

    def _groups(self, name: str, axis: int, num_in: int) -> int:
        """Number of groups of the scales ``name`` along ``axis``, which must divide the inputs."""
        shape = self._checkpoint.shape(name)
        num_groups = shape[axis] if len(shape) == 2 else 0
        if num_groups == 0 or num_in % num_groups != 0:
            raise ModelLoadError(
                f"{self._checkpoint.label}: tensor {name} has shape {list(shape)}, expected two "
                f"dimensions and a number of groups that divides {num_in} inputs"
            )
        return num_groups

    def _words(self, base: str, count: int, bits: Bits) -> int:
        """Number of int32 words of ``count`` codes, which must fill them."""
        per_word = 32 // bits
        if count % per_word != 0:
            raise ModelLoadError(
                f"{self._checkpoint.label}: {base} has {count} rows or columns, expected a "
                f"multiple of {per_word} for {bits}-bit codes"
            )
        return count // per_word

    def _gptq_or_awq(self, base: str, shape: tuple[int, int]) -> Reader:
        settings, read = self._settings, self._checkpoint.read
        if settings.method not in ("gptq", "awq"):
            raise ModelLoadError(
                f"{self._checkpoint.label}: {base}.qweight needs a quantization_config that says "
                "gptq or awq"
            )
        num_out, num_in = shape
        bits = settings.bits
        codes, zeros, scales = (f"{base}.{part}" for part in ("qweight", "qzeros", "scales"))
        group = settings.group_size
        if group is not None and num_in % group != 0:  # GPTQ's last group may be shorter
            num_groups = -(-num_in // group)
        else:
            num_groups = self._groups(scales, 0, num_in)
            group = num_in // num_groups
        self._check(scales, (num_groups, num_out), *_FLOATS)
        self._check(zeros, (num_groups, self._words(base, num_out, bits)), torch.int32)
        if settings.method == "awq":
            self._check(codes, (num_in, self._words(base, num_out, 4)), torch.int32)
            return lambda: from_awq(read(codes), read(zeros), read(scales))
        self._check(codes, (self._words(base, num_in, bits), num_out), torch.int32)
        read_index = self._group_index(f"{base}.g_idx", num_in, num_groups)
        return lambda: from_gptq(
            read(codes),
            read(zeros),
            read(scales),
            read_index(),
            bits=bits,
            group=group,
            zeros_are_less_one=settings.zeros_are_less_one,
        )

    def _group_index(
        self, name: str, num_in: int, num_groups: int
    ) -> Callable[[], torch.Tensor | None]:
        if name not in self._checkpoint:
            return lambda: None
        self._check(name, (num_in,), torch.int32, torch.int64)

        def read() -> torch.Tensor:
            index = self._checkpoint.read(name)
            if bool((index < 0).any()) or bool((index >= num_groups).any()):
                raise ModelLoadError(
                    f"{self._checkpoint.label}: tensor {name} names groups outside 0 to "
                    f"{num_groups - 1}"
                )
            return index

        return read

    def _packed(self, base: str, shape: tuple[int, int]) -> Reader:
        read, bits = self._checkpoint.read, self._settings.bits
        if self._settings.method != "compressed-tensors":
            raise ModelLoadError(
                f"{self._checkpoint.label}: {base}.weight_packed needs a quantization_config that "
                "says compressed-tensors"
            )
        num_out, num_in = shape
        per_word = 32 // bits
        codes, scale, zeros = (
            f"{base}.{part}" for part in ("weight_packed", "weight_scale", "weight_zero_point")
        )
        num_groups = self._groups(scale, 1, num_in)
        self._check(codes, (num_out, -(-num_in // per_word)), torch.int32)
        self._check(scale, (num_out, num_groups), *_FLOATS)
        has_zeros = zeros in self._checkpoint
        if has_zeros:
            self._check(zeros, (-(-num_out // per_word), num_groups), torch.int32)
        read_index = self._group_index(f"{base}.weight_g_idx", num_in, num_groups)
        return lambda: from_compressed(
            read(codes),
            read(scale),
            read(zeros) if has_zeros else None,
            read_index(),
            bits=bits,
            num_in=num_in,
        )

    def _int8(self, base: str, shape: tuple[int, int]) -> Reader:
        read, (num_out, num_in) = self._checkpoint.read, shape
        codes, scale, zeros = (
            f"{base}.{part}" for part in ("weight", "weight_scale", "weight_zero_point")
        )
        num_groups = self._groups(scale, 1, num_in)
        self._check(codes, shape, torch.int8)
        self._check(scale, (num_out, num_groups), *_FLOATS)
        has_zeros = zeros in self._checkpoint
        if has_zeros:
            self._check(zeros, (num_out, num_groups), torch.int8)
        return lambda: from_int8(read(codes), read(scale), read(zeros) if has_zeros else None)

    def _fp8(self, base: str, shape: tuple[int, int]) -> Reader:
        """e4m3 codes with a scale per tensor, row or block (then named ..._scale_inv)."""
        codes = f"{base}.weight"
        self._check(codes, shape, _FP8)
        name = next(
            (
                n
                for n in (f"{base}.weight_scale", f"{base}.weight_scale_inv")
                if n in self._checkpoint
            ),
            f"{base}.weight_scale",
        )
        scale_shape = self._checkpoint.shape(name)
        grid = {(): (1, 1), (1,): (1, 1), (shape[0],): (shape[0], 1)}.get(scale_shape, scale_shape)
        if (
            len(grid) != 2
            or 0 in grid
            or any(g > size for g, size in zip(grid, shape, strict=True))
        ):
            raise ModelLoadError(
                f"{self._checkpoint.label}: tensor {name} has shape {list(scale_shape)}, expected "
                f"one scale, or one for each row or block of {list(shape)}"
            )
        self._check(name, scale_shape, *_FLOATS)

        def read() -> torch.Tensor:
            scale = self._checkpoint.read(name).float().view(grid)
            weight = _scaled(self._checkpoint.read(codes), scale)
            # Codes and scales are finite, but their products may overflow.
            if not bool(weight.sum(dtype=torch.float64).isfinite()):
                raise ModelLoadError(
                    f"{self._checkpoint.label}: tensor {name} has scales so large that weights are "
                    "not finite"
                )
            return weight

        return read


def _scaled(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """codes fp8 [N, K] times scale [n, k], one per block of ceil(N / n) x ceil(K / k)."""
    values = codes.float()
    for axis, size in enumerate(values.shape):
        if scale.shape[axis] > 1:
            repeats = -(-size // scale.shape[axis])
            scale = scale.repeat_interleave(repeats, axis).narrow(axis, 0, size)
    return values.mul_(scale)
