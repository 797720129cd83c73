"""Selection of the backend on machines without a GPU."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import gpu
from llm_core.errors import ModelLoadError
from llm_core.messages import EngineConfig, ModelBackend
from llm_core.model import backend as backend_module
from llm_core.model.backend import RunnerOptions, check_float8, why_no_gpu
from llm_core.model.parallel import follower, launch
from llm_core.model.parallel.launch import Followers
from llm_core.model.runner import ModelRunner
from tests.support.random_llama import random_weights, tiny_config
from tests.support.tiny_model import write_tiny_gguf


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As most machines are, whatever this one has."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def make(backend: ModelBackend, **options: object) -> ModelRunner:
    config = tiny_config()
    return ModelRunner(config, random_weights(config), RunnerOptions(backend=backend, **options))  # type: ignore[arg-type]


def test_auto_without_a_gpu_uses_the_cpu_and_logs_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "llm_core.model.backend"):
        make("auto", weight_format="float32")
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("the model runs on torch: ")
    assert caplog.messages[0].endswith("; there is no CUDA device")


def test_required_but_missing_gpu_is_an_error() -> None:
    with pytest.raises(ModelLoadError, match="Triton kernels cannot run: there is no CUDA device"):
        make("triton")


def test_gpu_with_low_capability_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
    reason = why_no_gpu("auto")
    assert reason is not None and "Tesla T4 has compute capability 7.5" in reason
    with pytest.raises(ModelLoadError, match="Tesla T4"):
        why_no_gpu("triton")
    with caplog.at_level(logging.INFO, "llm_core.model.backend"):
        make("auto", weight_format="float32")
    assert len(caplog.messages) == 1 and "capability 7.5, expected 8.0" in caplog.messages[0]


def test_a_machine_without_triton_runs_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    assert why_no_gpu("auto") == "triton is not installed"
    with caplog.at_level(logging.INFO, "llm_core.model.backend"):
        assert not make("auto", weight_format="float32").samples_on_device
    assert len(caplog.messages) == 1
    assert caplog.messages[0].endswith("; triton is not installed")


def test_auto_never_selects_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why_no_gpu("triton") is None
    reason = why_no_gpu("auto")
    assert reason is not None and "interpreted" in reason


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_cpu_backends_do_not_use_the_gpu(
    backend: ModelBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "unavailable_reason", lambda: None)
    assert why_no_gpu(backend) == f"backend {backend} is asked for"
    assert why_no_gpu("auto") is None


def test_cpu_weight_format_selects_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend_module, "unavailable_reason", lambda: None)
    with caplog.at_level(logging.INFO, "llm_core.model.backend"):
        make("auto", weight_format="w8a8")
    assert caplog.messages[0].endswith("; weight format w8a8 is the CPU's")
    with pytest.raises(ModelLoadError, match="'w8a8' is not one of GPUs: auto, float32"):
        make("triton", weight_format="w8a8")


def test_gpu_only_options_are_rejected_on_the_cpu(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="fp8, which only the Triton kernels have"):
        make("torch", kv_dtype="fp8")
    path = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    with pytest.raises(ModelLoadError, match="tensor_parallel is 2, but there is no CUDA device"):
        ModelRunner.load(EngineConfig(model_path=path, tensor_parallel=2))
    with pytest.raises(ModelLoadError, match="tensor_parallel is 2, but backend torch"):
        ModelRunner.load(EngineConfig(model_path=path, tensor_parallel=2, backend="torch"))
    with pytest.raises(ValueError, match="overlap_rows must be at least 0"):
        EngineConfig(model_path=path, overlap_rows=-1)
    with pytest.raises(ValueError, match="tensor_parallel must be at least 1"):
        EngineConfig(model_path=path, tensor_parallel=0)


def test_fp8_is_rejected_by_gpus_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with pytest.raises(
        ValueError, match=r"fp8, which compute capability 8\.0 does not have: expec"
    ):
        check_float8("weights", "fp8", is_cuda=True)
    for form, is_cuda in (("int8", True), ("fp8", False)):
        check_float8("weights", form, is_cuda=is_cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    check_float8("weights", "fp8", is_cuda=True)


def test_tensor_parallel_needs_a_gpu_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ModelLoadError, match="tensor_parallel is 2, but there are 1 GPUs"):
        Followers(EngineConfig(model_path="none", tensor_parallel=2), None)


def test_a_rank_that_exits_at_once_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks: list[subprocess.Popen[bytes]] = []
    send = launch._send

    def send_late(process: subprocess.Popen[bytes], config: EngineConfig) -> None:
        ranks.append(process)
        process.wait()
        send(process, config)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(launch, "_send", send_late)
    monkeypatch.setattr(
        launch, "module_command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"]
    )
    with pytest.raises(ModelLoadError, match="a rank's process cannot be started: .*pipe"):
        Followers(EngineConfig(model_path="none", tensor_parallel=2), None)
    assert ranks[0].stdin is not None and ranks[0].stdin.closed


@pytest.mark.parametrize(
    ("error", "message", "has_trace"),
    [
        (ModelLoadError("no such file"), "cannot load its share of the model: no such file", False),
        (RuntimeError("CUDA error"), "rank 1 ends", True),
    ],
)
def test_a_rank_logs_why_it_exits(
    error: Exception,
    message: str,
    has_trace: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(ModelRunner, "follow", fail)
    config = EngineConfig(model_path="none", tensor_parallel=2)
    assert follower.follow(config, tmp_path, rank=1) == 1
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and message in record.getMessage()
    assert (record.exc_info is not None) == has_trace
