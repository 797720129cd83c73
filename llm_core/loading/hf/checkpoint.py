"""The weight files of a Hugging Face model directory: one safetensors file, or shards and an index.

An index may only name files of the directory itself. Pickled weights (.bin, .pt) are rejected with
advice to convert them; nothing is ever unpickled.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from llm_core.errors import ModelLoadError
from llm_core.loading.safetensors import SafetensorsFile

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MAX_JSON_BYTES = 1 << 26  # a tokenizer.json of 262k tokens has 33 MB
_MAX_SHARDS = 1000


class Checkpoint:
    """All tensors of a directory, a context manager. Raises ModelLoadError."""

    def __init__(self, directory: Path) -> None:
        self.label = directory.name
        self._files: list[SafetensorsFile] = []
        self._file_of: dict[str, SafetensorsFile] = {}
        try:
            for path in _weight_files(directory):
                file = SafetensorsFile(path)
                self._files.append(file)
                for name in file.tensors:
                    if name in self._file_of:
                        other = self._file_of[name].path.name
                        raise ModelLoadError(f"tensor {name} is in {other} and in {path.name}")
                    self._file_of[name] = file
            self._check_index(directory)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file_of)

    def close(self) -> None:
        """Closes all files; tensors that were read stay valid."""
        for file in self._files:
            file.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ModelLoadError if there is no such tensor."""
        return self._file(name).tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Raises ModelLoadError if there is no such tensor."""
        return self._file(name).tensors[name].dtype

    def check(self, name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
        """Raises ModelLoadError unless ``name`` exists with this shape and one of the dtypes."""
        file = self._file(name)
        entry = file.tensors[name]
        if entry.shape != shape:
            raise ModelLoadError(
                f"{file.path.name}: tensor {name} has shape {list(entry.shape)}, expected "
                f"{list(shape)}"
            )
        if dtypes and entry.dtype not in dtypes:
            expected = " or ".join(_short(dtype) for dtype in dtypes)
            raise ModelLoadError(
                f"{file.path.name}: tensor {name} is {_short(entry.dtype)}, expected {expected}"
            )

    def read(self, name: str) -> torch.Tensor:
        """A copy of tensor ``name``. Raises ModelLoadError if it holds NaN or infinity."""
        file = self._file(name)
        values = file.read(name)
        if values.dtype.is_floating_point and not _is_finite(values):
            raise ModelLoadError(f"{file.path.name}: tensor {name} holds NaN or infinite values")
        return values

    def _file(self, name: str) -> SafetensorsFile:
        file = self._file_of.get(name)
        if file is None:
            raise ModelLoadError(f"{self.label}: tensor {name} is missing")
        return file

    def _check_index(self, directory: Path) -> None:
        if not (directory / _SINGLE).exists():
            for name, file_name in _weight_map(directory).items():
                if self._file(name).path.name != file_name:
                    raise ModelLoadError(
                        f"{_INDEX} places tensor {name} in {file_name}, but it is in "
                        f"{self._file(name).path.name}"
                    )


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file of limited size. Raises ModelLoadError."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelLoadError(f"{path.name}: larger than {_MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path.name}: not sound JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path.name}: not a JSON object")
    return value


def _weight_files(directory: Path) -> list[Path]:
    single = directory / _SINGLE
    if single.exists():
        return [single]
    if (directory / _INDEX).exists():
        names = sorted(set(_weight_map(directory).values()))
        if len(names) > _MAX_SHARDS:
            raise ModelLoadError(f"{_INDEX}: more than {_MAX_SHARDS} files")
        return [directory / name for name in names]
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if pickles:
        raise ModelLoadError(
            f"{directory.name}: {pickles[0]} is a pickle, which can run any program when it is "
            "loaded, and is never read; convert the model to safetensors"
        )
    raise ModelLoadError(f"{directory.name}: has neither {_SINGLE} nor {_INDEX}")


def _weight_map(directory: Path) -> dict[str, str]:
    weight_map = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{_INDEX}: weight_map is not an object with entries")
    for name, file_name in weight_map.items():
        is_plain = isinstance(file_name, str) and file_name.endswith(".safetensors")
        if not is_plain or Path(file_name).name != file_name or "\\" in file_name:
            raise ModelLoadError(
                f"{_INDEX}: tensor {name:.80} is in {file_name!r:.80}, expected the plain name of "
                "a .safetensors file in the same directory"
            )
    return weight_map


def _is_finite(values: torch.Tensor) -> bool:
    """Checks a sum, in which NaN and infinity propagate, without a temporary."""
    if values.dtype == torch.float8_e4m3fn:  # has NaN (all but the sign bit set), no infinity
        return not bool(((values.view(torch.uint8) & 0x7F) == 0x7F).any())
    wide = torch.float64 if values.dtype in (torch.float32, torch.float64) else torch.float32
    return bool(values.sum(dtype=wide).isfinite())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
