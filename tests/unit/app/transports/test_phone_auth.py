"""Twilio's signature with Twilio's own signer as the peer; tokens; calls of an account."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.datastructures import Headers
from twilio.request_validator import RequestValidator

from app.access.auth import AuthenticationError, Authenticator
from app.api.telephony.auth import (
    MAX_TOKENS,
    TOKEN_LIFETIME_S,
    CallTokens,
    PhoneGuard,
    SignatureError,
    TooManyCallsError,
    check_twilio,
    tokens_in,
    twilio_signature,
)
from app.config import Settings
from app.transports.telephony.protocol import Started

AUTH_TOKEN = "12345678901234567890123456789012"
URLS = [
    "https://voice.example.org/phone/twilio/voice",
    "https://voice.example.org:8443/phone/twilio/voice?a=b&c=%20d",
    "http://127.0.0.1:8080/phone/twilio/voice",
]
PARAMS = {"CallSid": "CA1", "From": "+14155550100", "Empty": "", "Name": "Zoë & 100% = +"}


@pytest.mark.parametrize("url", URLS)
def test_what_twilio_signs_is_accepted(url: str) -> None:
    signature = RequestValidator(AUTH_TOKEN).compute_signature(url, PARAMS)
    params = {name: [value] for name, value in PARAMS.items()}
    assert twilio_signature(AUTH_TOKEN, url, params) == signature
    check_twilio(AUTH_TOKEN, url, params, signature)


def test_a_port_that_is_the_usual_one_may_be_signed_or_not() -> None:
    sign = RequestValidator(AUTH_TOKEN).compute_signature
    with_port = "https://voice.example.org:443/phone/twilio/voice"
    check_twilio(AUTH_TOKEN, URLS[0], {}, sign(with_port, {}))
    check_twilio(AUTH_TOKEN, with_port, {}, sign(URLS[0], {}))


def test_values_that_come_several_times_are_signed_as_twilio_does() -> None:
    class Form(dict[str, Any]):
        def getall(self, name: str) -> list[str]:
            return ["b", "a", "b"]

    signature = RequestValidator(AUTH_TOKEN).compute_signature(URLS[0], Form(Key="b"))
    assert twilio_signature(AUTH_TOKEN, URLS[0], {"Key": ["b", "a", "b"]}) == signature


@pytest.mark.parametrize(
    ("url", "params", "auth_token", "signature"),
    [
        (URLS[0] + "x", PARAMS, AUTH_TOKEN, None),
        (URLS[0], PARAMS | {"CallSid": "CA2"}, AUTH_TOKEN, None),
        (URLS[0], {}, AUTH_TOKEN, None),
        (URLS[0], PARAMS, "another", None),
        (URLS[0], PARAMS, AUTH_TOKEN, ""),
        (URLS[0], PARAMS, AUTH_TOKEN, "ümlaut\udcff"),
    ],
)
def test_anything_else_is_refused(
    url: str, params: dict[str, str], auth_token: str, signature: str | None
) -> None:
    if signature is None:
        signature = RequestValidator(AUTH_TOKEN).compute_signature(URLS[0], PARAMS)
    with pytest.raises(SignatureError, match="PARLEY_PHONE_PUBLIC_URL"):
        check_twilio(auth_token, url, {n: [v] for n, v in params.items()}, signature)


def test_a_token_is_good_once_for_its_call_and_for_a_minute() -> None:
    now = [0.0]
    tokens = CallTokens(lambda: now[0])
    token = tokens.create("CA1")
    assert tokens.take(token, "CA1")
    assert not tokens.take(token, "CA1"), "once"
    assert not tokens.take(tokens.create("CA1"), "CA2"), "for its call"
    late = tokens.create("CA1")
    now[0] += TOKEN_LIFETIME_S
    assert not tokens.take(late, "CA1"), "for a minute"
    assert not tokens.take("", "")
    for number in range(MAX_TOKENS + 5):
        tokens.create(f"CA{number}")
    assert len(tokens) == MAX_TOKENS


def guard(**settings: Any) -> PhoneGuard:
    known = Settings(**settings)
    return PhoneGuard(known, Authenticator(known))


def started(**parameters: str) -> Started:
    return Started("CA1", "AC1", parameters)


def test_without_any_secret_anybody_may_call() -> None:
    assert guard().check(started(), []) == "anyone"


@pytest.mark.parametrize(
    "settings",
    [{"api_keys": ("k1",)}, {"phone_token": "p"}, {"phone_twilio_auth_token": AUTH_TOKEN}],
)
def test_with_a_secret_a_stream_must_bring_a_token(settings: dict[str, Any]) -> None:
    door = guard(**settings)
    for tokens in ([], ["wrong"], ["ümlaut"], ["", "wrong"]):
        with pytest.raises(AuthenticationError):
            door.check(started(token="wrong too"), tokens)
    made = door.tokens.create("CA1")
    assert door.check(started(token=made), []) == door.operator
    with pytest.raises(AuthenticationError):
        door.check(started(token=made), [])


def test_keys_and_the_phone_token_are_taken_from_path_header_or_parameter() -> None:
    door = guard(api_keys=("k1", "k2"), phone_token="p")
    assert door.check(started(), ["k1"]) == door.operator
    assert door.check(started(token="k2"), []) != door.operator, "the calls of another key"
    assert door.check(started(), ["wrong", "p"]) == door.operator
    assert tokens_in(Headers({"authorization": "Bearer p"})) == ["p"]
    assert tokens_in(Headers({"authorization": "Basic dXNlcjpw"})) == ["p"]
    assert tokens_in(Headers({"authorization": "Basic ?"})) == []
    assert tokens_in(Headers({})) == []


def test_an_account_has_so_many_calls_at_once() -> None:
    door = guard(phone_max_calls_per_account=1)
    with door.counted("a"), door.counted("b"), pytest.raises(TooManyCallsError), door.counted("a"):
        pass
    with door.counted("a"):
        pass
