"""Building and loading the compiled kernels, and the reasons given if that fails."""

from __future__ import annotations

import logging
import platform
import re
import subprocess
from pathlib import Path

import pytest
import torch

from app.config import Settings
from app.engine_options import engine_config
from kernels.native import NativeUnavailableError, build
from kernels.native.library import STRUCTURES
from llm_core import EngineClient
from llm_core.errors import ModelLoadError
from llm_core.messages import EngineConfig
from llm_core.model.backend import RunnerOptions, default_native_cache_dir, make_model
from llm_core.model.native_decoder import NativeDecoder
from llm_core.model.runner import ModelRunner
from llm_core.model.torch_decoder import TorchDecoder
from tests.support.native_library import native_cache_dir, native_library
from tests.support.random_llama import random_weights, tiny_config
from tests.support.tiny_model import write_tiny_gguf


def compiler(tmp_path: Path, script: str) -> str:
    """A command that answers --version, and else runs ``script``."""
    path = tmp_path / "test-cc"
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo test-cc 1; exit; fi\n{script}\n'
    )
    path.chmod(0o700)
    return str(path)


def choose(backend: str, cache_dir: Path, **changes: object) -> tuple[object, str]:
    config = tiny_config()
    options = RunnerOptions(
        backend=backend,  # type: ignore[arg-type]
        weight_format="auto",
        native_cache_dir=cache_dir,
    )
    weights = random_weights(config)
    return make_model(tiny_config(**changes), weights, options, 64)


def test_second_build_reuses_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    native_library("this CPU")
    first = build.build(native_cache_dir())
    changed_ns = first.stat().st_mtime_ns
    assert build.build(native_cache_dir()) == first
    assert first.stat().st_mtime_ns == changed_ns
    assert [path for path in native_cache_dir().iterdir() if path.suffix != ".so"] == []


def test_library_depends_on_cpu_and_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, 'while [ "$1" != -o ]; do shift; done; : > "$2"'))
    paths = {build.build(tmp_path / "cache"), build.build(tmp_path / "cache", is_scalar=True)}
    monkeypatch.setattr(build, "_cpu_identity", lambda: "another")
    paths.add(build.build(tmp_path / "cache"))
    assert len(paths) == 3
    assert all(path.exists() for path in paths)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo bad flag >&2; exit 3", "status 3: bad flag"),
        ("exit 1", "status 1"),
        (r"printf 'bad \377 flag' >&2; exit 3", "status 3: bad \ufffd flag"),
    ],
)
def test_failed_compilation_is_reported_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, script))
    with pytest.raises(NativeUnavailableError, match=words):
        build.build(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(NativeUnavailableError, match=r"no C compiler.*no-such-compiler"):
        build.build(tmp_path)


def test_malformed_compiler_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc '-O2")
    with pytest.raises(NativeUnavailableError, match=r"CC is .*gcc '-O2.*No closing quotation"):
        build.build(tmp_path)


def test_folder_writable_by_others_is_rejected(tmp_path: Path) -> None:
    """Code is loaded from it."""
    tmp_path.chmod(0o777)
    with pytest.raises(NativeUnavailableError, match="writable by others"):
        build.build(tmp_path)


def test_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NativeUnavailableError, match="cannot be used"):
        build.build(tmp_path / "file" / "cache")


def test_library_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a disk was full: an empty file is where the library should be."""
    monkeypatch.setenv("CC", compiler(tmp_path, 'while [ "$1" != -o ]; do shift; done; : > "$2"'))
    with pytest.raises(ModelLoadError, match="does not load"):
        choose("native", tmp_path / "cache")


def test_auto_falls_back_to_torch_and_logs_the_reason_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.INFO, "llm_core.model.backend"):
        model, _ = choose("auto", tmp_path)
    assert isinstance(model, TorchDecoder)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "runs on torch" in caplog.messages[0]
    assert "no C compiler found" in caplog.messages[0]
    assert "install gcc or clang" in caplog.messages[0]
    with pytest.raises(ModelLoadError, match="no C compiler"):
        choose("native", tmp_path)


def test_no_warning_if_torch_is_requested_or_the_only_choice(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.INFO, "llm_core.model.backend"):
        choose("auto", tmp_path, head_dim=6)  # what no compiler helps
        make_model(tiny_config(), random_weights(tiny_config()), RunnerOptions(backend="auto"), 64)
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]


async def test_server_with_an_unwritable_folder_logs_a_remedy(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As ``parley serve`` starts its engine, on a home that is read-only (also for root)."""
    (tmp_path / "file").touch()
    settings = Settings(home=tmp_path, native_dir=tmp_path / "file" / "native")
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    engine = await EngineClient.start(engine_config(settings, path, {"standby": "false"}))
    await engine.close()
    (line,) = [one for one in capfd.readouterr().err.splitlines() if "runs on torch" in one]
    assert " warning " in line
    assert f"{tmp_path}/file/native cannot be used" in line
    assert "PARLEY_NATIVE_DIR" in line


def test_native_is_chosen_if_available(caplog: pytest.LogCaptureFixture) -> None:
    native_library("this CPU")  # skips without a compiler
    with caplog.at_level(logging.INFO, "llm_core.model.backend"):
        model, kept_as = choose("native", native_cache_dir())
    assert isinstance(model, NativeDecoder)
    assert kept_as == "int8"
    assert len(caplog.messages) == 1
    assert "compiled code" in caplog.messages[0]
    with pytest.raises(ModelLoadError, match="head_dim 6"):
        choose("native", native_cache_dir(), head_dim=6)
    with pytest.raises(ModelLoadError, match="float32"):
        make_model(tiny_config(), {}, RunnerOptions(backend="native"), 64)


def test_auto_prefers_torch_over_portable_code(monkeypatch: pytest.MonkeyPatch) -> None:
    library = native_library("portable")
    monkeypatch.setattr("llm_core.model.backend.load", lambda _: library)
    assert isinstance(choose("auto", native_cache_dir())[0], TorchDecoder)
    assert isinstance(choose("native", native_cache_dir())[0], NativeDecoder)


def test_runner_uses_the_backend_of_the_engine_configuration(tmp_path: Path) -> None:
    native_library("this CPU")
    path = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    cache = str(native_cache_dir())
    native = ModelRunner.load(
        EngineConfig(model_path=path, backend="native", native_cache_dir=cache)
    )
    plain = ModelRunner.load(EngineConfig(model_path=path, backend="torch"))
    assert native.info_fields["weight_format"] == "int8"
    assert plain.info_fields["weight_format"] != "int8"
    with torch.inference_mode():
        assert isinstance(native._model, NativeDecoder)


@pytest.mark.parametrize("name", STRUCTURES)
def test_ctypes_fields_are_those_of_the_header_in_order(name: str) -> None:
    """The load-time check of sizes cannot see two fields of one type that changed places."""
    header = (build.SOURCE_DIR / "parley.h").read_text()
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    bodies = re.findall(r"typedef struct \{([^}]*)\} (\w+);", header)
    (body,) = (body for body, of in bodies if of == name)
    declarations = [part.strip() for part in body.split(";") if part.strip()]
    fields = [
        re.findall(r"\w+", declarator)[-1]
        for declaration in declarations
        for declarator in declaration.split(",")
    ]
    assert [field[0] for field in STRUCTURES[name]._fields_] == fields


@pytest.mark.parametrize("flag", ["-march=haswell", "-march=x86-64", "-DPARLEY_SCALAR"])
def test_sources_compile_without_warnings_for_other_cpus(tmp_path: Path, flag: str) -> None:
    native_library("this CPU")  # skips without a compiler
    if flag.startswith("-march") and platform.machine() != "x86_64":
        pytest.skip("flags of x86")
    sources = map(str, build.SOURCE_DIR.glob("*.c"))
    command = [*build._compiler(), *build._FLAGS, "-O1", "-Werror", flag, *sources]
    subprocess.run([*command, "-o", str(tmp_path / "parley.so")], check=True)


def test_default_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_native_cache_dir() == Path("/somewhere/parley/native")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_native_cache_dir() == Path.home() / ".cache/parley/native"
