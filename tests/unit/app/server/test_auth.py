"""Keys, and pages of other sites."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from app.access.auth import AuthenticationError, Authenticator, HostError, OriginError
from app.config import Settings, load_settings
from app.errors import ConfigError
from app.logging_setup import session_id, setup_logging, speech_field

KEYED = Authenticator(Settings(api_keys=("first-key", "zweiter-schlüssel")))
OPEN = Authenticator(Settings())


def check(gate: Authenticator, *subprotocols: str, **headers: str) -> None:
    gate.check(Headers(headers), subprotocols)


def test_no_keys_configured_means_no_key_is_asked_for() -> None:
    check(OPEN)
    check(OPEN, authorization="Bearer anything")


@pytest.mark.parametrize("key", ["first-key", "zweiter-schlüssel"])
def test_a_known_key_is_taken_from_either_place(key: str) -> None:
    check(KEYED, authorization=f"Bearer {key}")
    check(KEYED, authorization=f"bearer  {key}")
    check(KEYED, "realtime", f"openai-insecure-api-key.{key}")


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer first-ke",
        "Bearer first-keyy",
        "Basic first-key",
        "first-key",
    ],
)
def test_anything_else_is_refused(authorization: str) -> None:
    with pytest.raises(AuthenticationError) as caught:
        check(KEYED, "realtime", authorization=authorization)
    assert caught.value.code == "invalid_api_key"
    assert "first-ke" not in caught.value.message


def test_a_wrong_subprotocol_key_is_refused() -> None:
    with pytest.raises(AuthenticationError):
        check(KEYED, "realtime", "openai-insecure-api-key.wrong")
    with pytest.raises(AuthenticationError):
        check(KEYED, "openai-insecure-api-key.")


def test_pages_of_the_server_itself_may_connect() -> None:
    check(OPEN, origin="http://127.0.0.1:8080", host="127.0.0.1:8080")
    # TLS ends at a proxy: the page is https, we see http.
    check(OPEN, origin="https://voice.example", host="Voice.Example")


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "http://127.0.0.1:9999", "null", "", "file://", "https://", "http://["],
)
def test_other_pages_may_not(origin: str) -> None:
    with pytest.raises(OriginError):
        check(OPEN, origin=origin, host="127.0.0.1:8080")


def test_the_operator_may_allow_other_pages() -> None:
    gate = Authenticator(Settings(allowed_origins=("https://App.example/",)))
    check(gate, origin="https://app.example", host="parley.example")
    with pytest.raises(OriginError):
        check(gate, origin="http://app.example", host="parley.example")
    check(Authenticator(Settings(allowed_origins=("*",))), origin="null", host="x")


@pytest.fixture
def log() -> io.StringIO:
    return io.StringIO()


def test_logs_carry_the_session_and_hide_keys(log: io.StringIO) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        setup_logging(Settings(api_keys=("hidden-key",), ice_credential="turn-word"), log)
        token = session_id.set("sess_7")
        logging.getLogger("app.test").info(
            "headers: Authorization: Bearer other-key\nopenai-insecure-api-key.third-key turn-word",
            extra={"key": "hidden-key", "num_bytes": 12},
        )
        logging.getLogger("app.test").debug("not at this level")
        session_id.reset(token)
    finally:
        root.handlers[:], root.level = before
    (line,) = log.getvalue().splitlines()
    assert " info app.test session=sess_7 turn=- headers" in line
    assert "num_bytes=12" in line
    for key in ("hidden-key", "other-key", "third-key", "turn-word"):
        assert key not in line


def test_logs_as_json(log: io.StringIO) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        setup_logging(Settings(log_format="json", api_keys=("hidden-key",)), log)
        token = session_id.set("sess_7")
        extra = {"key": "hidden-key", "took_s": 1.5, "path": Path("/a"), "level": "mine"}
        try:
            raise ValueError("ek_0123456789abcdef is\nnot shown")
        except ValueError:
            logging.getLogger("app.test").exception("two\nlines", extra=extra)
        session_id.reset(token)
    finally:
        root.handlers[:], root.level = before
    (line,) = log.getvalue().splitlines()
    record = json.loads(line)
    assert record["message"] == "two\nlines"
    assert (record["level"], record["logger"]) == ("error", "app.test")
    assert (record["session"], record["turn"]) == ("sess_7", "-")
    assert (record["took_s"], record["path"], record["key"]) == (1.5, "/a", "[hidden]")
    assert "ValueError: ek_[hidden]" in record["exception"]


def test_words_are_logged_only_on_request() -> None:
    assert speech_field(Settings(), "transcript", "secret words") == {"transcript_chars": 12}
    assert speech_field(Settings(log_transcripts=True), "transcript", "words") == {
        "transcript": "words"
    }


@pytest.mark.parametrize(
    ("host", "settings", "is_ours"),
    [
        ("localhost:8080", {}, True),
        ("127.0.0.1:8080", {}, True),
        ("[::1]:8080", {}, True),
        ("192.168.1.20", {}, True),
        ("evil.example:8080", {}, False),
        ("", {}, False),
        ("[", {}, False),
        ("127.0.0.1]:80", {}, False),
        ("[::1", {}, False),
        ("localhost.evil.example", {}, False),
        ("parley.example", {"allowed_hosts": "parley.example, other.example"}, True),
        ("PARLEY.example:443", {"allowed_hosts": '["parley.example"]'}, True),
        ("box.lan:8080", {"host": "box.lan"}, True),
        ("evil.example", {"allowed_hosts": "*"}, True),
    ],
)
def test_a_name_that_was_rebound_to_us_is_refused(
    host: str, settings: dict[str, str], is_ours: bool
) -> None:
    gatekeeper = Authenticator(Settings.model_validate(settings))
    headers = Headers({"host": host} if host else {})
    if is_ours:
        gatekeeper.check_host(headers)
    else:
        with pytest.raises(HostError, match="PARLEY_ALLOWED_HOSTS"):
            gatekeeper.check_host(headers)


def test_keys_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, keys in (
        ("abc", ("abc",)),
        ("abc, def", ("abc", "def")),
        ('["abc"]', ("abc",)),
        ("", ()),
    ):
        monkeypatch.setenv("PARLEY_API_KEYS", value)
        settings = load_settings()
        assert settings.api_keys == keys
        assert "abc" not in repr(settings)
    for bad in ('[""]', "[1", "[1]"):
        monkeypatch.setenv("PARLEY_API_KEYS", bad)
        with pytest.raises(ConfigError, match="PARLEY_API_KEYS"):
            load_settings()
