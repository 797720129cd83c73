"""ONNX Runtime sessions on the CPU, with threads that sleep when idle."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from audio.errors import ModelError

# Their only common base is Exception.
ORT_ERRORS: tuple[type[Exception], ...] = (
    ort_errors.EPFail,
    ort_errors.EngineError,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NoModel,
    ort_errors.NoSuchFile,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
    RuntimeError,
)


def open_file(
    path: Path, num_threads: int, what: str, *, keeps_memory: bool = True
) -> ort.InferenceSession:
    """Load the ONNX file ``path``. Raises ModelError, naming ``what`` and the file."""
    what = f"{what} {path}"
    try:
        model = path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot load {what}: {error}") from error
    return open_session(model, num_threads, what, keeps_memory=keeps_memory)


def open_session(
    model: bytes, num_threads: int, what: str, *, keeps_memory: bool = True
) -> ort.InferenceSession:
    """Load the content of an ONNX file. Raises ModelError, naming ``what``.

    ``keeps_memory``: keep the memory of a run in an arena for the next one.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    # Spinning idle threads take cores from the LLM and from other callers.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.enable_cpu_mem_arena = keeps_memory
    options.log_severity_level = 3
    try:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except ORT_ERRORS as error:
        raise ModelError(f"cannot load {what}: no readable ONNX file: {error}") from error
