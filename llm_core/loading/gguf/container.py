"""Reader of the GGUF format, for untrusted files.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
Constants are those of the ``gguf`` package. Its reader is not used: it takes 9 s for a vocabulary
of 49k tokens (0.2 s here), and loops over unchecked counts. Every count and length is checked
against the remaining bytes before anything is allocated.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import numpy as np
import torch
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)

from llm_core.errors import ModelLoadError
from llm_core.loading.mapped_file import MappedFile
from llm_core.quant import BLOCK_BYTES, BlockKind, BlockTensor, Weight, block_len

_VERSIONS = (2, 3)
_MAX_DIMS = 4
# Vocabularies of 262k tokens with merges take about 15 MB; a parsed header is larger.
_MAX_HEADER_BYTES = 1 << 26
_SCALARS: dict[int, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
    GGUFValueType.BOOL: np.dtype("?"),
}
_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Location of a tensor. ``shape`` has the outermost dimension first, as in torch."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


class GgufFile:
    """An open file: ``metadata`` (plain Python values; number arrays are numpy) and ``tensors``.

    A context manager. Raises ModelLoadError for malformed files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._map = MappedFile(self.path)
        try:
            reader = _Reader(self._map, self.path.name)
            num_tensors = reader.header()
            self.metadata = reader.metadata()
            self.tensors = reader.tensor_infos(num_tensors, self.metadata)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps the file; weights that were read stay valid."""
        self._map.close()

    def read(self, name: str, shape: tuple[int, ...]) -> Weight:
        """A copy of tensor ``name``, which must have ``shape``.

        Raises ModelLoadError, also for NaN or infinite values or scales.
        """
        info = self.check(name, shape)
        data = self._map.copy(info.offset, info.num_bytes)
        if info.kind in _FLOATS:
            values = data.view(_FLOATS[info.kind]).view(shape)
            if not bool(values.sum(dtype=torch.float64).isfinite()):
                raise self._error(f"tensor {name} holds NaN or infinite values")
            return values
        kind = cast(BlockKind, info.kind.name)
        num_blocks = shape[1] // block_len(kind)
        weight = BlockTensor(kind, data.view(shape[0], num_blocks, BLOCK_BYTES[kind]))
        if not weight.scales_are_finite():
            raise self._error(f"tensor {name} ({kind}) holds NaN or infinite scales")
        return weight

    def check(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        """Location of ``name``. Raises ModelLoadError for a missing tensor or an unsupported shape
        or format."""
        info = self.tensors.get(name)
        if info is None:
            raise self._error(f"tensor {name} is missing")
        if info.shape != shape:
            raise self._error(f"tensor {name} has shape {list(info.shape)}, expected {list(shape)}")
        is_matrix_of_blocks = len(shape) == 2 and info.kind.name in BLOCK_BYTES
        if info.kind not in _FLOATS and not is_matrix_of_blocks:
            raise self._error(
                f"tensor {name} of shape {list(shape)} has format {info.kind.name}, supported are "
                f"F32, F16, BF16 and for matrices {', '.join(BLOCK_BYTES)}"
            )
        return info

    def _error(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path.name}: {message}")


def read_metadata(path: str | Path) -> dict[str, Any]:
    """The metadata of a file, which include the tokenizer. Raises ModelLoadError."""
    with GgufFile(path) as file:
        return file.metadata


class _Reader:
    """A cursor over the header. Positions: [0, _at) read | [_at, _size) left."""

    def __init__(self, data: MappedFile, label: str) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0
        self._label = label

    def header(self) -> int:
        """Checks magic and version; returns the tensor count. The metadata count is next."""
        if self._take(4, "the magic number") != b"GGUF":
            raise self._error("not a GGUF file (wrong magic number)")
        version = self._uint32("the version")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "big-endian GGUF" if swapped in _VERSIONS else f"GGUF version {version}"
            raise self._error(f"{kind} is not supported")
        # Minimum bytes of an entry: name length 8, dimension count 4, one dimension 8, kind 4,
        # offset 8; for a metadata entry: key length 8, type 4, value 1.
        return self._count("tensor count", least_bytes=32)

    def metadata(self) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for _ in range(self._count("metadata count", least_bytes=13)):
            key = self._string("a metadata key")
            if key in result:
                raise self._error(f"metadata key {key!r} occurs twice")
            result[key] = self._value(self._uint32(key), key)
        return result

    def tensor_infos(self, num_tensors: int, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
        infos: dict[str, TensorInfo] = {}
        for _ in range(num_tensors):
            info = self._tensor_info()
            if info.name in infos:
                raise self._error(f"tensor {info.name} occurs twice")
            infos[info.name] = info
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._error(f"general.alignment is {alignment!r}, expected a power of two")
        base = -(-self._at // alignment) * alignment
        for info in infos.values():
            end = base + info.offset + info.num_bytes
            if end > self._size:
                raise self._error(
                    f"truncated: tensor {info.name} ends at byte {end}, the file at {self._size}"
                )
        return {
            name: TensorInfo(name, info.shape, info.kind, base + info.offset, info.num_bytes)
            for name, info in infos.items()
        }

    def _tensor_info(self) -> TensorInfo:
        name = self._string("a tensor name")
        num_dims = self._uint32(name)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._error(f"tensor {name} has {num_dims} dimensions, expected 1 to {_MAX_DIMS}")
        dims = struct.unpack(f"<{num_dims}Q", self._take(8 * num_dims, name))
        raw_kind = self._uint32(name)
        try:
            kind = GGMLQuantizationType(raw_kind)
        except ValueError as error:
            raise self._error(f"tensor {name} has unknown format number {raw_kind}") from error
        block_len, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in dims or dims[0] % block_len != 0:
            raise self._error(
                f"tensor {name} has dimensions {list(dims)}, expected positive ones, the first a "
                f"multiple of {block_len} ({kind.name})"
            )
        num_bytes = math.prod(dims) // block_len * block_bytes
        return TensorInfo(name, tuple(reversed(dims)), kind, self._uint64(name), num_bytes)

    def _value(self, kind: int, key: str) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string(key)
        if kind == GGUFValueType.ARRAY:
            return self._array(key)
        dtype = self._scalar_type(kind, key)
        return np.frombuffer(self._take(dtype.itemsize, key), dtype)[0].item()

    def _array(self, key: str) -> list[str] | np.ndarray[Any, Any]:
        kind = self._uint32(key)
        if kind == GGUFValueType.STRING:
            return [self._string(key) for _ in range(self._count(key, least_bytes=8))]
        dtype = self._scalar_type(kind, key)
        num_values = self._count(key, least_bytes=dtype.itemsize)
        return np.frombuffer(self._take(num_values * dtype.itemsize, key), dtype).copy()

    def _scalar_type(self, kind: int, key: str) -> np.dtype[Any]:
        dtype = _SCALARS.get(kind)
        if dtype is None:
            raise self._error(f"metadata {key!r} has unsupported type number {kind}")
        return dtype

    def _count(self, what: str, *, least_bytes: int) -> int:
        """A uint64 count of items of at least ``least_bytes``, which must fit in the file."""
        count = self._uint64(what)
        if count * least_bytes > self._size - self._at:
            raise self._error(f"{what} is {count}, more than the rest of the file can hold")
        self._check_header(self._at + count * least_bytes, what)
        return count

    def _string(self, what: str) -> str:
        raw = self._take(self._uint64(what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not UTF-8 text") from error

    def _uint32(self, what: str) -> int:
        return int.from_bytes(self._take(4, what), "little")

    def _uint64(self, what: str) -> int:
        return int.from_bytes(self._take(8, what), "little")

    def _take(self, num_bytes: int, what: str) -> bytes:
        end = self._at + num_bytes
        if end > self._size:
            raise self._error(
                f"truncated: {what} needs {num_bytes} bytes at byte {self._at}, "
                f"the file has {self._size}"
            )
        self._check_header(end, what)
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _check_header(self, end: int, what: str) -> None:
        """Raises ModelLoadError if the header is larger than that of any model."""
        if end > _MAX_HEADER_BYTES:
            raise self._error(
                f"{what} goes to byte {end} at least, but at most {_MAX_HEADER_BYTES} are accepted "
                "before the tensors"
            )

    def _error(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self._label}: {message}")
