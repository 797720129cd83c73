"""How long a killed engine is gone: ``python -m bench.llm.engine_restart``.

Two replies run when the process is killed (SIGKILL), as in a server with its reserve
(``PARLEY_LLM_STANDBY``): when they have their error, and when the next answer has its first token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import time
from contextlib import suppress

from app.config import load_settings
from app.engine_options import engine_config
from app.models.store import ModelStore
from llm_core import ChatMessage, EngineClient, EngineDiedError, LlmError, SamplingParams

QUESTION = [ChatMessage("user", "Tell me a long story about the sea.")]
ENDLESS = SamplingParams(max_tokens=1000, ignore_eos=True)


async def kill_once(client: EngineClient) -> tuple[float, float]:
    """Seconds until both replies have ended with an error, and until the next first token."""
    replies = [client.generate(QUESTION, ENDLESS) for _ in range(2)]
    for reply in replies:
        await anext(reply)
    assert client._process is not None
    os.kill(client._process.pid, signal.SIGKILL)
    killed_s = time.monotonic()
    for reply in replies:
        with suppress(EngineDiedError):
            async for _ in reply:
                pass
            raise AssertionError("a reply of a killed engine ended as if it were whole")
    told_s = time.monotonic() - killed_s
    while True:
        next_reply = client.generate(QUESTION, SamplingParams(max_tokens=2))
        try:
            await anext(next_reply)
            back_s = time.monotonic() - killed_s
            await next_reply.aclose()
            return told_s, back_s
        except LlmError:
            await asyncio.sleep(0.02)


async def measure(model: str, times: int, is_standby: bool) -> None:
    """Prints a line a kill, and the medians."""
    settings = load_settings()
    path = ModelStore(settings.home).resolve(model or settings.llm_model)
    options = {"standby": str(is_standby).lower()}
    client = await EngineClient.start(engine_config(settings, path, options))
    try:
        found = []
        for _ in range(times):
            await asyncio.sleep(4)  # the next reserve loads its code meanwhile
            found.append(await kill_once(client))
            print(f"told after {found[-1][0] * 1e3:.0f} ms, back after {found[-1][1]:.2f} s")
        told, back = zip(*found, strict=True)
        print(
            f"median of {times}: told after {statistics.median(told) * 1e3:.0f} ms, back after "
            f"{statistics.median(back):.2f} s (at most {max(back):.2f} s)"
        )
    finally:
        await client.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--no-standby", action="store_true")
    chosen = parser.parse_args()
    asyncio.run(measure(chosen.model, chosen.times, not chosen.no_standby))
