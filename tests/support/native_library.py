"""The compiled kernels for tests: built once a run, for this CPU and in portable C."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest

from kernels.native import Library, NativeUnavailableError, load

FORMS = ("this CPU", "portable")


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="parley-native-")


def native_cache_dir() -> Path:
    """Where the libraries of this run are built."""
    return Path(_folder().name) / "native"


@cache
def native_library(form: str) -> Library:
    """Skips the test where there is no compiler."""
    try:
        return load(native_cache_dir(), is_scalar=form == "portable")
    except NativeUnavailableError as error:
        pytest.skip(f"no compiled kernels: {error}")
