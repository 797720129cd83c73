"""`parley quantize`, `distill`, `shorten` and `bench perplexity` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.cli.main import main
from tests.support.tiny_model import write_tiny_gguf

PROSE = "The user says hello, and the model says what the user hoped to hear. " * 40
SHORT = ("--window-len", "32", "--weight-format")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    path = tmp_path / "prose.txt"
    path.write_text(PROSE)
    return path


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    code = stopped.value.code
    return code if isinstance(code, int) else 0


def test_quantize_then_measure(
    tiny: Path, prose: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    small = ("--window-len", 32, "--threads", 1)
    assert run("quantize", tiny, "--out", out, "--group", 32, "--text", prose, *small) == 0
    said = capsys.readouterr()
    assert "perplexity" in said.out and "before" in said.out and "after" in said.out
    assert "tiny: float32 weights" in said.out and f"written     {out}" in said.out
    assert "quantising layers" in said.err and "2/2" in said.err
    figures = []
    for model in (tiny, out):
        arguments = ("bench", "perplexity", "--model", model, "--text", prose, "--json", *small)
        assert run(*arguments) == 0
        figures.append(json.loads(capsys.readouterr().out))
    assert figures[0]["num_tokens"] == figures[1]["num_tokens"] > 100
    assert figures[1]["perplexity"] == pytest.approx(figures[0]["perplexity"], rel=0.2)
    assert figures[1]["perplexity"] != figures[0]["perplexity"]


def test_shorten(tiny: Path, prose: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for question in ("", "What was it?"):
        arguments = ("shorten", prose, "--max-tokens", 60, "--model", tiny, "--question", question)
        assert run(*arguments, "--threads", 1) == 0
        said = capsys.readouterr()
        assert 0 < len(said.out) < len(PROSE) / 2
        assert all(line in PROSE for line in said.out.strip().split(". "))
        assert "tokens before" in said.err and "reading the text" in said.err


def test_distill(
    tiny: Path, prose: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--text", prose, "--window-len", 32, "--threads", 1)
    arguments = ("distill", tiny, "--out", tmp_path / "out", "--layers", 1, "--steps", 3, *small)
    assert run(*arguments) == 0
    said = capsys.readouterr().out
    assert "layers      0 of the teacher's" in said
    assert "untrained" in said and "trained" in said and "same best token" in said


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("quantize", "MODEL"), 2, "Missing option '--out'"),
        (
            ("quantize", "MODEL", "--out", "OUT", "--method", "gguf"),
            2,
            "known are gptq, awq, rtn, int8, fp8",
        ),
        (("quantize", "MODEL", "--out", "OUT", "--bits", "5"), 1, "bits is 5, expected 4 or 8"),
        (("quantize", "MODEL", "--out", "OUT", "--group", "7"), 1, "group is 7"),
        (
            ("quantize", "MODEL", "--out", "OUT", "--text", "none.txt"),
            1,
            "none.txt: cannot be read",
        ),
        (("quantize", "MODEL", "--out", "OUT", "--text", "MODEL"), 1, "is not text in UTF-8"),
        (("quantize", "none.gguf", "--out", "OUT"), 1, "none.gguf"),
        (("quantize", "PROSE", "--out", "OUT"), 1, "prose.txt"),
        (("shorten", "PROSE", "--max-tokens", "1", "--model", "MODEL"), 1, "no sentence of the"),
        (("shorten", "none.txt", "--max-tokens", "9", "--model", "MODEL"), 1, "none.txt"),
        (("distill", "MODEL", "--out", "OUT", "--layers", "2"), 1, "expected 1 to 1"),
        (
            ("distill", "MODEL", "--out", "OUT", "--layers", "1", "--learning-rate", "7"),
            1,
            "learning_rate is 7.0, expected between 0 and 1",
        ),
        (("bench", "perplexity", "--model", "MODEL"), 2, "Missing option '--text'"),
        (
            ("bench", "perplexity", "--model", "MODEL", "--text", "PROSE", "--window-len", "999"),
            1,
            "longer than the model's context",
        ),
        (
            ("bench", "perplexity", "--model", "MODEL", "--text", "PROSE", "--window-len", "9000"),
            1,
            "at least 9000",
        ),
        (
            ("bench", "perplexity", "--model", "MODEL", "--text", "PROSE", *SHORT, "x"),
            1,
            "weight format 'x' is not known, only auto, float32",
        ),
    ],
)
def test_mistakes_are_told(
    tiny: Path,
    prose: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)
    names = {"MODEL": str(tiny), "PROSE": str(prose), "OUT": "out"}
    before = sorted(path.name for path in tmp_path.iterdir())
    assert run(*(names.get(argument, argument) for argument in arguments)) == code
    said = capsys.readouterr()
    assert message in said.err
    assert "Traceback" not in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == before
