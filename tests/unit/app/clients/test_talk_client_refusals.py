"""The talk client at doors that stay shut: what it tells the person who stands before them."""

from __future__ import annotations

import asyncio

import pytest

from app.clients.talk import ConnectError, open_talk

BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("scheme", ["https", "wss"])
@pytest.mark.parametrize(
    ("reply", "complaint"), [(BAD_REQUEST, "does not speak TLS"), (b"", "hung up: perhaps")]
)
async def test_a_server_without_tls(scheme: str, reply: bytes, complaint: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)
        writer.write(reply)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(ConnectError, match=complaint) as failed:
            async with open_talk(f"{scheme}://{host}"):
                pass
    assert failed.value.message.endswith(f"try http://{host}")


async def test_a_key_that_no_header_can_carry(closed_port: int) -> None:
    with pytest.raises(ConnectError, match="invalid characters") as failed:
        async with open_talk(f"http://127.0.0.1:{closed_port}", api_key="se\r\nsame"):
            pass
    assert "same" not in failed.value.message
