"""Settings from the environment: what is told of mistakes."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from app.cli.config import to_markdown
from app.cli.main import cli
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


def test_the_configuration_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == to_markdown(), "run: parley config --markdown > docs/configuration.md"


def test_every_setting_has_a_description_that_is_a_sentence() -> None:
    for name, field in Settings.model_fields.items():
        text = field.description or ""
        assert text and text[0].isupper() and text.endswith("."), name


def test_the_settings_in_force_are_shown_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARLEY_API_KEYS", "sk-one")
    monkeypatch.setenv("PARLEY_ICE_SERVERS", "turn:user:pass@host")
    monkeypatch.setenv("PARLEY_PORT", "9001")
    result = CliRunner().invoke(cli, ["config", "--changed"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()[1:]]
    assert ["PARLEY_PORT", "9001", "8080"] in rows
    assert ["PARLEY_API_KEYS", "(set)"] in rows and ["PARLEY_ICE_SERVERS", "(set)"] in rows
    assert "sk-one" not in result.output and "pass" not in result.output


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
