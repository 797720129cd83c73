"""Settings from the environment: what is told of mistakes."""

from __future__ import annotations

import re

import pytest

from app.config import Settings, load_settings, unknown_variables
from app.errors import ConfigError
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("PORT", "abc", "PARLEY_PORT: Input should be a valid integer, .*, not 'abc'$"),
        ("PORT", "99999", "PARLEY_PORT: Input .* less than or equal to 65535, not '99999'$"),
        ("MAX_SESSION_S", "inf", "PARLEY_MAX_SESSION_S: .* finite number, not 'inf'$"),
        ("LOG_LEVEL", "loud", "PARLEY_LOG_LEVEL: Input should be 'debug', .*, not 'loud'$"),
        # An item of a list has no variable of its own.
        ("BUDGET_POLICIES", "filler,magic", "PARLEY_BUDGET_POLICIES: .*, not 'magic'$"),
        ("BUDGET_STAGES_MS", "asr", "PARLEY_BUDGET_STAGES_MS: .*"),
    ],
)
def test_a_mistake_is_told_with_its_variable_and_value(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, told: str
) -> None:
    monkeypatch.setenv(f"PARLEY_{name}", value)
    with pytest.raises(ConfigError, match=f"^invalid settings: {told}"):
        load_settings()


def test_words_are_taken_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOG_LEVEL", "LOG_FORMAT", "TURN_DETECTION", "METRICS", "LLM_BACKEND"):
        default = str(getattr(Settings(), name.lower()))
        monkeypatch.setenv(f"PARLEY_{name}", default.upper())
        assert getattr(load_settings(), name.lower()) == default


def test_a_secret_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARLEY_API_KEYS", '["secret')
    monkeypatch.setenv("PARLEY_PORT", "x" * 10_000)
    with pytest.raises(ConfigError, match="PARLEY_API_KEYS: ") as error:
        load_settings()
    assert "secret" not in error.value.message
    assert len(error.value.message) < 1_000


def test_the_readme_tells_the_defaults() -> None:
    told: dict[str, str] = {}
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `PARLEY_"):
            names, default, _ = (cell.strip() for cell in line.strip("| ").split(" | ", 2))
            defaults = default.split(", ") if ", " in names and ", " in default else [default] * 9
            told |= zip(re.findall("PARLEY_([A-Z0-9_]+)", names), defaults, strict=False)
    assert len(told) > 30, "the table of settings was not found"
    wrong = {}
    for name, default in told.items():
        field = Settings.model_fields[name.lower()]  # KeyError: there is no such setting
        value = field.get_default(call_default_factory=True)
        words = [",".join(value)] if isinstance(value, tuple) else [f"{value}".lower()]
        words += [f"{value:g}"] if isinstance(value, float) else []
        if default not in (words if value not in (None, "", ()) else ["none"]):
            wrong[name] = default
    in_words = {"INSTRUCTIONS", "LLM_MODEL", "ASR_MODEL", "TTS_MODEL", "LLM_THREADS", "HOME"}
    assert wrong.keys() == in_words | {"NATIVE_DIR"}, wrong


def test_a_slip_of_the_pen_is_told() -> None:
    environment = {
        "PARLEY_PORT": "1",
        "PARLEY_API_KEY": "x",
        "PARLEY_MAX_SESION": "3",
        "PARLEY_XYZZY": "",
        "OTHER": "y",
    }
    ignored = "is not a setting of the server and is ignored"
    assert unknown_variables(environment, Settings()) == [
        f"PARLEY_API_KEY {ignored}; did you mean PARLEY_API_KEYS?",
        f"PARLEY_MAX_SESION {ignored}; did you mean PARLEY_MAX_SESSIONS?",
        f"PARLEY_XYZZY {ignored}",
    ]
    del environment["PARLEY_MAX_SESION"], environment["PARLEY_XYZZY"]
    assert unknown_variables(environment, Settings(api_keys=("x",))) == []
