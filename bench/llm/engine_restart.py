"""How long a killed engine is gone: until its replies fail, and until the next first token.

    python -m bench.llm.engine_restart [MODEL] [--times 5] [--no-standby] [--json OUT]

Two replies are running when the engine process is killed (SIGKILL), as in a server with its standby
process (``PARLEY_LLM_STANDBY``).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from contextlib import suppress
from statistics import median

from app.config import load_settings
from app.engine_options import engine_config
from app.models.store import ModelStore
from bench.harness.results import Result, add_json_option, report
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
            raise AssertionError("a reply of a killed engine ended as if it were complete")
    failed_s = time.monotonic() - killed_s
    while True:
        next_reply = client.generate(QUESTION, SamplingParams(max_tokens=2))
        try:
            await anext(next_reply)
            back_s = time.monotonic() - killed_s
            await next_reply.aclose()
            return failed_s, back_s
        except LlmError:
            await asyncio.sleep(0.02)


async def measure(options: argparse.Namespace) -> Result:
    """A row for each kill, and one of medians."""
    settings = load_settings()
    path = ModelStore(settings.home).resolve(options.model or settings.llm_model)
    changes = {"standby": str(not options.no_standby).lower()}
    result = Result(("kill", "replies fail after, ms", "next first token after, s"))
    found = []
    client = await EngineClient.start(engine_config(settings, path, changes))
    try:
        for number in range(options.times):
            await asyncio.sleep(4)  # the next standby process loads its code meanwhile
            failed_s, back_s = await kill_once(client)
            found.append((failed_s, back_s))
            result.add(str(number + 1), round(failed_s * 1e3, 1), round(back_s, 3))
    finally:
        await client.close()
    failed, back = zip(*found, strict=True)
    result.add("median", round(median(failed) * 1e3, 1), round(median(back), 3))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--no-standby", action="store_true")
    add_json_option(parser)
    options = parser.parse_args()
    report(asyncio.run(measure(options)), options)


if __name__ == "__main__":
    main()
