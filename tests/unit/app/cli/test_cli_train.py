"""`parley train-eagle` as a user meets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli.main import main
from tests.support.tiny_model import write_tiny_gguf


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    code = stopped.value.code
    return code if isinstance(code, int) else 0


def test_a_head_is_trained_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf", context_len=512)
    text = tmp_path / "text.txt"
    text.write_text("The user says hello. The model hopes to hear it, and says so!")
    out = tmp_path / "head"
    short = ("--talk-minutes", 1e-5, "--train-minutes", 0.005, "--draft-vocab", 64, "--threads", 1)
    arguments = ("train-eagle", model, "--out", out, "--data", tmp_path / "data", *short)
    assert run(*arguments, "--text", text) == 0
    shown = capsys.readouterr()
    assert "tokens of answers" in shown.out and "chain of 4" in shown.out
    assert "the model talks" in shown.err and "training" in shown.err
    assert {path.name for path in out.iterdir()} == {
        "head.safetensors",
        "head_config.json",
        "card.json",
    }
    assert run(*arguments) == 1
    assert "holds a head already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (("--kind", "eagle9"), 2, "known are eagle3, eagle1, medusa"),
        (("--talk-minutes", -1), 2, "should be greater than or equal to 0"),
        (("--talk-minutes", 0), 1, "let the model talk longer"),
    ],
)
def test_what_cannot_be_done_is_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: tuple[object, ...],
    code: int,
    message: str,
) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    arguments = ("train-eagle", model, "--out", tmp_path / "out", "--data", tmp_path / "data")
    assert run(*arguments, *more) == code
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
