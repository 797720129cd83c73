"""Phone calls over real sockets, provider by provider, with stand-ins for the models."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from twilio.request_validator import RequestValidator
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from app.clients.phone_providers import PEERS, Clear, Goodbye, Mark, Play
from app.conversation import history
from app.conversation.tools import ToolBox, ToolContext, tool
from app.transports.telephony import line as line_module
from tests.support.leaks import Memory
from tests.support.phone_caller import PATIENCE_S, Caller, Server, phone, phone_server

LONG = " ".join(["word"] * 24)  # 5 s of it
SHORT = "Yes it is."
AUTH_TOKEN = "12345678901234567890123456789012"
# What ends a call for good.
STATES = ("silent", "greeting", "speaking", "thinking", "answering", "interrupting", "dialling")


def said(server: Server, number: int) -> str:
    """All that the model read in its ``number``-th request."""
    return "\n".join(f"{m.role}: {m.content}" for m in server.engine.requests[number])


async def until_requests(server: Server, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(server.engine.requests) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("provider", PEERS)
async def test_a_whole_call(provider: str, tmp_path: Path) -> None:
    async with (
        phone_server(tmp_path, LONG) as server,
        phone(server, provider) as caller,
    ):
        # An answer is heard.
        await caller.ask()
        await caller.until(Play, 10)
        assert caller.loudness > 0.4
        assert "user: Hello?" in said(server, 0)
        # The caller's voice stops it, at the provider as well, and what was not heard is forgotten.
        await caller.say(0.6)
        if provider != "audiosocket":
            await caller.until(Clear)
        played_s = caller.played_s
        caller.forget()
        await caller.say(0.7, level=0.0)
        await until_requests(server, 2)
        answer = re.search(r"assistant: (.*)", said(server, 1))
        num_words = len(answer[1].split()) if answer else 0
        assert num_words < 24
        # 0.2 s a word; and 0.2 s are sent ahead
        assert num_words * 0.2 <= played_s + 0.3
        # A key stops the answer, too, and a row of keys is a turn.
        await caller.until(Play, 3)
        await caller.press("1")
        if provider != "audiosocket":
            await caller.until(Clear)
        await caller.press("2#")
        await until_requests(server, 3)
        assert "keys of the phone: 1 2 #" in said(server, 2)
        caller.forget()
        await caller.until(Play, 3)
        # The caller hangs up in the middle of an answer.
        await caller.goodbye()
        if provider != "vonage":  # there the socket says it
            await caller.until_ended()


async def test_the_greeting_comes_first_and_gives_way(tmp_path: Path) -> None:
    greeting = "Hello, this is a long greeting that nobody wants to hear to its end."
    async with phone_server(tmp_path, SHORT, phone_greeting=greeting) as server:
        async with phone(server) as caller:
            await caller.until(Play, 5)
            await caller.ask()
            await caller.until(Clear)
            await until_requests(server, 1)
            assert f"assistant: {greeting}" in said(server, 0)
        async with phone(server) as caller:
            length_s = len(greeting) / 24
            async with asyncio.timeout(10):
                while caller.played_s < length_s:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            await asyncio.sleep(0.1)
            assert caller.played_s < length_s + 0.1, "once"


@pytest.mark.parametrize("provider", ["twilio", "audiosocket"])
async def test_the_assistant_hangs_up_after_its_last_word(provider: str, tmp_path: Path) -> None:
    call = '<tool_call>{"name": "hang_up", "arguments": {}}</tool_call>'
    async with (
        phone_server(tmp_path, call, "Goodbye then.", phone_hang_up_tool=True) as server,
        phone(server, provider) as caller,
    ):
        caller.plays = False
        await caller.ask()
        marks = provider == "twilio"
        await caller.until(Mark if marks else Play, 5)
        async with asyncio.timeout(5):
            while caller.played_s < 13 / 24:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        if marks:
            await asyncio.sleep(0.7)
            assert not caller.ended.is_set(), "the last word was not heard yet"
            await caller.give_back()
        await caller.until_ended()
        assert caller.played_s >= 13 / 24
        if not marks:
            assert isinstance(caller.orders[-1], Goodbye)


async def test_a_tool_knows_which_call_it_serves(tmp_path: Path) -> None:
    orders: list[tuple[str, str, list[str]]] = []

    @tool
    async def add_pizza(kind: str, talk: ToolContext) -> str:
        talk.notes.setdefault("pizzas", []).append(kind)
        orders.append((talk.call_id, talk.session_id, list(talk.notes["pizzas"])))
        return "noted"

    def wanted(kind: str) -> str:
        call = {"name": "add_pizza", "arguments": {"kind": kind}}
        return f"<tool_call>{json.dumps(call)}</tool_call>"

    replies = [wanted("salami"), SHORT, wanted("funghi"), SHORT, wanted("tonno"), SHORT]
    box = ToolBox([add_pizza])
    async with phone_server(tmp_path, *replies, tools=box, phone_hang_up_tool=True) as server:
        callers = []
        for num_turns in (2, 1):
            async with phone(server) as caller:
                callers.append(caller.peer.call_id)
                for _ in range(num_turns):
                    caller.forget()
                    await caller.ask()
                    await caller.until(Mark)
    (one, first, _), (_, second, _), (other, third, _) = orders
    assert [one, other] == callers and first == second != third and first.startswith("sess_")
    kept = [pizzas for *_, pizzas in orders]
    assert kept == [["salami"], ["salami", "funghi"], ["tonno"]], "each call has its own order"


async def bring_to(state: str, server: Server, caller: Caller) -> None:
    match state:
        case "silent":
            await asyncio.sleep(0.05)
        case "greeting":
            await caller.until(Play)
        case "speaking":
            await caller.say(0.5)
        case "thinking":
            await caller.ask()
            await until_requests(server, len(PEERS))
        case "answering" | "interrupting":
            await caller.ask()
            await caller.until(Play)
            if state == "interrupting":
                await caller.say(0.5)
        case "dialling":
            await caller.press("12")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("is_polite", [True, False])
async def test_hanging_up_in_every_state_leaves_nothing(
    state: str, is_polite: bool, tmp_path: Path
) -> None:
    """A call of each provider at once; the server checks at its end that nothing is left."""
    greeting = LONG if state == "greeting" else ""
    async with phone_server(tmp_path, LONG, phone_greeting=greeting) as server:
        if state == "thinking":
            server.engine.gate.clear()

        async def call(provider: str) -> None:
            async with phone(server, provider) as caller:
                caller.plays = False
                await bring_to(state, server, caller)
                if is_polite:
                    await caller.goodbye()

        async with asyncio.TaskGroup() as calls:
            for provider in PEERS:
                calls.create_task(call(provider))
        await server.until_free()
        server.engine.gate.set()


@pytest.mark.parametrize("provider", ["twilio", "audiosocket"])
async def test_a_line_that_carries_nothing_is_hung_up(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_module, "SILENT_LINE_S", 0.3)
    async with phone_server(tmp_path, SHORT) as server, phone(server, provider) as caller:
        for _ in range(20):  # the caller's silence keeps it
            await caller.say(0.02, level=0.0)
            await asyncio.sleep(0.02)
        assert not caller.ended.is_set() and server.num_calls == 1
        await caller.until_ended()
        await server.until_free()


async def test_fifty_callers_vanish_at_random(tmp_path: Path) -> None:
    chance = random.Random(8)

    async def call_once(server: Server) -> None:
        provider = chance.choice([*PEERS])
        async with phone(server, provider, begins=False) as caller:
            await asyncio.sleep(chance.random() * 0.05)
            if chance.random() < 0.1:
                return
            await caller.hello()
            await asyncio.sleep(chance.random() * 0.1)
            await caller.ask()
            await asyncio.sleep(chance.random() * 0.3)
            if chance.random() < 0.5:
                await caller.press("5")
                await caller.goodbye()

    async with phone_server(
        tmp_path,
        LONG,
        phone_greeting="Hello.",
        max_sessions_per_minute=1000,
        phone_max_calls_per_account=50,
    ) as server:
        await asyncio.gather(*(call_once(server) for _ in range(6)))
        await server.until_free()
        memory = Memory()
        for _ in range(5):
            await asyncio.gather(*(call_once(server) for _ in range(10)))
        await server.until_free()
        await memory.assert_returned()


async def closing(server: Server, *messages: str, path: str = "", key: str = "") -> tuple[int, str]:
    """Close code and reason after these messages."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = server.url.replace("http", "ws") + "/phone/stream" + path
    async with connect(url, proxy=None, additional_headers=headers) as socket:
        for message in messages:
            await socket.send(message)
        with pytest.raises(ConnectionClosed) as closed:
            async with asyncio.timeout(5):
                while True:
                    await socket.recv()
        assert closed.value.rcvd is not None
        return closed.value.rcvd.code, closed.value.rcvd.reason


async def test_a_stream_must_bring_a_token_where_keys_are_set(tmp_path: Path) -> None:
    async with phone_server(tmp_path, SHORT, api_keys=("k1",), phone_token="p1") as server:
        hello = PEERS["twilio"]("CA1").hello()
        code, reason = await closing(server, *hello)
        assert (code, reason) == (1008, "The stream brings no valid token.")
        assert (await closing(server, *hello, path="/wrong"))[0] == 1008
        for token in ("k1", "p1"):
            async with phone(server, "plivo", token=token) as caller:
                await caller.ask()
                await caller.until(Play)
        stop = PEERS["twilio"]("CA1").goodbye()
        assert isinstance(stop, str)
        assert (await closing(server, *hello, stop, path="/p1"))[0] == 1000
        assert (await closing(server, *hello, stop, key="k1"))[0] == 1000
        async with phone(server, "audiosocket") as caller:  # its port is trusted
            await caller.ask()
            await caller.until(Play)


async def test_streams_that_do_not_begin_are_told_why(tmp_path: Path) -> None:
    async with phone_server(tmp_path, SHORT, max_sessions=1) as server:
        assert (await closing(server, "{}"))[0] == 1008
        connected = json.dumps({"event": "connected"})
        assert await closing(server, connected, connected) == (1008, "'connected' came twice")
        async with phone(server) as caller:
            await caller.ask()
            await caller.until(Play)
            code, reason = await closing(server, *PEERS["twilio"]("CA2").hello())
            assert code == 1013 and "in use" in reason


async def test_a_call_without_an_id_gets_one_and_an_id_is_taken_once(tmp_path: Path) -> None:
    async with phone_server(tmp_path, SHORT) as server:
        connected = {"event": "websocket:connected", "content-type": "audio/l16;rate=8000"}
        url = server.url.replace("http", "ws") + "/phone/stream"
        async with connect(url, proxy=None) as one, connect(url, proxy=None) as other:
            for socket in (one, other):
                await socket.send(json.dumps(connected))
            async with asyncio.timeout(5):
                while server.num_calls < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        async with phone(server) as caller:
            await caller.ask()
            await caller.until(Play)
            code, reason = await closing(server, *PEERS["twilio"](caller.peer.call_id).hello())
            assert (code, reason) == (1008, "A call of this id is running.")


async def test_an_account_may_have_so_many_calls(tmp_path: Path) -> None:
    async with phone_server(tmp_path, SHORT, phone_max_calls_per_account=1) as server:
        async with phone(server) as caller:
            await caller.ask()
            await caller.until(Play)
            code, reason = await closing(server, *PEERS["twilio"]("CA2").hello())
            assert code == 1008 and "may have no more" in reason
        await server.until_free()
        async with phone(server) as caller:
            await caller.ask()
            await caller.until(Play)


async def test_clients_attach_to_a_phone_call(tmp_path: Path) -> None:
    async with phone_server(tmp_path, SHORT) as server, phone(server) as caller:
        await caller.ask()
        await caller.until(Play)
        url = server.url.replace("http", "ws") + f"/v1/realtime?call_id={caller.peer.call_id}"
        async with connect(url, proxy=None) as client:
            assert json.loads(await client.recv())["type"] == "session.created"
            await caller.press("7")
            async with asyncio.timeout(5):
                while (event := json.loads(await client.recv()))["type"] != (
                    "input_audio_buffer.dtmf_event_received"
                ):
                    pass
            assert event["event"] == "7"


async def test_keys_are_taken_again_when_a_full_conversation_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients that attach may fill it."""
    async with phone_server(tmp_path, SHORT) as server, phone(server) as caller:
        await caller.ask()
        await caller.until(Play)
        await until_requests(server, 1)
        monkeypatch.setattr(history, "MAX_ITEMS", 0)
        await caller.press("1#")
        async with asyncio.timeout(PATIENCE_S):
            while not any("keys of the phone are lost" in m for m in caplog.messages):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        monkeypatch.undo()
        await caller.press("2#")
        await until_requests(server, 2)
        assert "keys of the phone: 2 #" in said(server, 1)


# --- Twilio's webhook ---


def signed(url: str, form: dict[str, str], **headers: str) -> dict[str, Any]:
    signature = RequestValidator(AUTH_TOKEN).compute_signature(url, form)
    return {"data": form, "headers": {"x-twilio-signature": signature, **headers}}


async def test_a_call_from_twilio_end_to_end(tmp_path: Path) -> None:
    async with (
        phone_server(
            tmp_path,
            SHORT,
            phone_twilio_auth_token=AUTH_TOKEN,
            phone_public_url="https://voice.example.org/parley",
        ) as server,
        httpx.AsyncClient(base_url=server.url) as http,
    ):
        path = "/phone/twilio/voice"
        public = "https://voice.example.org/parley" + path
        form = {"CallSid": "CA1", "AccountSid": "AC1", "From": "+1"}
        answer = await http.post(path, **signed(public, form))
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/xml")
        assert '<Stream url="wss://voice.example.org/parley/phone/stream">' in answer.text
        assert '<Parameter name="from" value="+1"/>' in answer.text, "for tools to know"
        token = re.search(r'name="token" value="([^"]+)"', answer.text)
        assert token is not None
        hello = PEERS["twilio"]("CA2", token[1]).hello()
        assert (await closing(server, *hello))[0] == 1008, "a token is for its call"
        token = re.search(r'value="([^"]+)"', (await http.post(path, **signed(public, form))).text)
        assert token is not None
        peer = PEERS["twilio"]("CA1", token[1])
        stop = peer.goodbye()
        assert isinstance(stop, str)
        assert (await closing(server, *peer.hello(), stop)) == (1000, "the stream was stopped")
        assert (await closing(server, *peer.hello()))[0] == 1008, "a token is good once"


async def test_a_webhook_that_twilio_did_not_sign_is_refused(tmp_path: Path) -> None:
    path = "/phone/twilio/voice"
    async with (
        phone_server(tmp_path, SHORT, phone_twilio_auth_token=AUTH_TOKEN) as server,
        httpx.AsyncClient(base_url=server.url) as http,
    ):
        form = {"CallSid": "CA1"}
        good = signed(server.url + path, form)
        assert (await http.post(path, **good)).status_code == 200
        for wrong in (
            {"data": form},
            {**good, "data": {"CallSid": "CA2"}},
            signed("https://elsewhere.example.org" + path, form),
            {"content": b"\xff\xfe", "headers": good["headers"]},
            {"content": b"a=b&" * 499, "headers": good["headers"]},
        ):
            answer = await http.post(path, **wrong)
            assert answer.status_code == 403
            assert "CA1" not in answer.text and answer.json()["error"]["message"]
        too_long = {"content": b"a=b&" * 20_000, "headers": good["headers"]}
        assert (await http.post(path, **too_long)).status_code == 413
    async with (
        phone_server(tmp_path, SHORT) as server,
        httpx.AsyncClient(base_url=server.url) as http,
    ):
        answer = await http.post(path, data={"CallSid": "CA1"})
        assert answer.status_code == 501
        assert "PARLEY_PHONE_TWILIO_AUTH_TOKEN" in answer.json()["error"]["message"]


async def test_a_full_server_is_busy(tmp_path: Path) -> None:
    async with (
        phone_server(
            tmp_path, SHORT, phone_twilio_auth_token=AUTH_TOKEN, phone_token="p", max_sessions=1
        ) as server,
        phone(server, token="p") as caller,
        httpx.AsyncClient(base_url=server.url) as http,
    ):
        await caller.ask()
        await caller.until(Play)
        url = server.url + "/phone/twilio/voice"
        answer = await http.post(url, **signed(url, {"CallSid": "CA1"}))
        assert '<Reject reason="busy"/>' in answer.text
