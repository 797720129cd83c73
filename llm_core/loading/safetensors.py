"""Reader of the safetensors format, for untrusted files.

Format: https://github.com/huggingface/safetensors#format: a little-endian uint64 header length, a
JSON header {name: {dtype, shape, data_offsets}}, then the data, which the tensors fill without gap
or overlap.

The safetensors package (0.8) is not used: it keeps the pages of a whole file resident until the
file is closed (192 MB for 201 MB read tensor by tensor), names no tensor for a wrong dtype, shape
or truncation, and accepts duplicate names.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeGuard

import torch

from llm_core.errors import ModelLoadError
from llm_core.loading.mapped_file import MappedFile

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# Ten thousand tensors take about 1 MB; a parsed header can be thirty times as large.
_MAX_HEADER_BYTES = 1 << 24
_MAX_DIMS = 8
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in bytes [start, end) of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """An open file, a context manager. Raises ModelLoadError for malformed files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        try:
            self.tensors = self._entries(self._header())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps the file; tensors that were read stay valid."""
        self._file.close()

    def read(self, name: str) -> torch.Tensor:
        """A copy of tensor ``name``, which must be in ``tensors``."""
        entry = self.tensors[name]
        return (
            self._file.copy(entry.start, entry.end - entry.start)
            .view(entry.dtype)
            .view(entry.shape)
        )

    def mapped(self, name: str) -> torch.Tensor:
        """Tensor ``name``, which must be in ``tensors``, mapped copy-on-write: pages are read on
        access and can be evicted by the system. A tensor whose data is not aligned is copied.

        Truncating the file while it is mapped kills the process on access (SIGBUS).
        """
        entry = self.tensors[name]
        if entry.start % entry.dtype.itemsize != 0 or entry.start == entry.end:
            return self.read(name)
        pages = torch.from_file(
            str(self.path), shared=False, size=len(self._file), dtype=torch.uint8
        )
        return pages[entry.start : entry.end].view(entry.dtype).view(entry.shape)

    def _header(self) -> dict[str, Any]:
        size = len(self._file)
        if size < _LENGTH_BYTES:
            raise self._error(f"truncated: {size} bytes, the header length alone has 8")
        length = int.from_bytes(self._file[:_LENGTH_BYTES], "little")
        if length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise self._error(
                f"not a safetensors file, or truncated: its header claims {length} bytes; the file "
                f"has {size}, and at most {_MAX_HEADER_BYTES} are accepted"
            )
        try:
            header = json.loads(
                self._file[_LENGTH_BYTES : _LENGTH_BYTES + length],
                object_pairs_hook=_without_duplicates,
            )
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
            raise self._error(f"the header is not sound JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._error("the header is not a JSON object")
        header.pop("__metadata__", None)
        self._data_start = _LENGTH_BYTES + length
        return header

    def _entries(self, header: dict[str, Any]) -> dict[str, TensorEntry]:
        entries = {name: self._entry(name, fields) for name, fields in header.items()}
        at, before = self._data_start, "the header"
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
            if entry.start != at:
                how = "overlaps" if entry.start < at else "leaves a gap after"
                raise self._error(f"tensor {name} {how} {before}")
            at, before = entry.end, f"tensor {name}"
        if at != len(self._file):
            raise self._error(f"{len(self._file) - at} bytes at the end belong to no tensor")
        return entries

    def _entry(self, name: str, fields: Any) -> TensorEntry:
        if not isinstance(fields, dict):
            raise self._error(f"tensor {name} is not described by a JSON object")
        dtype = fields.get("dtype")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self._error(
                f"tensor {name} has dtype {dtype!r:.40}, supported are {', '.join(DTYPES)}"
            )
        shape, offsets = fields.get("shape"), fields.get("data_offsets")
        if not _are_sizes(shape) or len(shape) > _MAX_DIMS:
            raise self._error(
                f"tensor {name} has shape {shape!r:.80}, expected up to {_MAX_DIMS} sizes"
            )
        if not _are_sizes(offsets) or len(offsets) != 2:
            raise self._error(f"tensor {name} has data_offsets {offsets!r:.80}, expected two")
        start, end = (self._data_start + offset for offset in offsets)
        if end > len(self._file):
            raise self._error(
                f"truncated: tensor {name} ends at byte {end}, the file at {len(self._file)}"
            )
        num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
        if end - start != num_bytes:
            raise self._error(
                f"tensor {name} has {end - start} bytes, expected {num_bytes} for {dtype} of "
                f"shape {shape}"
            )
        return TensorEntry(DTYPES[dtype], tuple(shape), start, end)

    def _error(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path.name}: {message}")


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 1 << 48 for value in values
    )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"{name!r:.80} occurs twice")
        result[name] = value
    return result
