"""llama.cpp's own server as a measured engine. Needs the extra `bench`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from app.errors import ParleyError
from bench.llm.engines import Generated, Stopwatch
from llm_core import ChatMessage

_START_TIMEOUT_S = 120.0


class LlamaCppEngine:
    """llama.cpp's server in a process of its own, ``python -m bench.llm.llama_cpp``."""

    name = "llama.cpp"

    def __init__(self, process: asyncio.subprocess.Process, http: httpx.AsyncClient) -> None:
        self._process = process
        self._http = http

    @classmethod
    async def start(
        cls, model_path: Path, *, num_threads: int, num_streams: int, max_context: int
    ) -> LlamaCppEngine:
        """Start the process. Raises ParleyError when it fails or xllamacpp is not installed."""
        arguments = (str(model_path), str(num_threads), str(num_streams), str(max_context))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.llm.llama_cpp", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert process.stdout is not None, "asked for a pipe"
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                line = await process.stdout.readline()
            answer: dict[str, str] = json.loads(line) if line else {"error": "it ended at once"}
        except BaseException as error:
            process.kill()
            await process.wait()
            if isinstance(error, TimeoutError):
                why = f"it was not ready after {_START_TIMEOUT_S:g} s"
                raise ParleyError(f"llama.cpp cannot be started: {why}") from error
            raise
        if "error" in answer:
            await process.wait()
            raise ParleyError(f"llama.cpp cannot be started: {answer['error']}")
        # Its server closes connections that are idle for a few seconds.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        http = httpx.AsyncClient(base_url=answer["url"], timeout=600.0, limits=limits)
        return cls(process, http)

    async def generate(self, messages: Sequence[ChatMessage], num_tokens: int) -> Generated:
        """See ``MeasuredEngine``."""
        body = {
            "messages": [{"role": m.role, "content": m.content} for m in messages],
            "max_tokens": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        watch = Stopwatch()
        usage: dict[str, Any] = {}
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise ParleyError(f"llama.cpp refused: {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if any(choice["delta"].get("content") for choice in event.get("choices", ())):
                    watch.text()
                usage = event.get("usage") or usage
        details = usage.get("prompt_tokens_details") or {}
        return watch.generated(
            usage["prompt_tokens"], details.get("cached_tokens", 0), usage["completion_tokens"]
        )

    async def close(self) -> None:
        """See ``MeasuredEngine``."""
        await self._http.aclose()
        assert self._process.stdin is not None, "asked for a pipe"
        self._process.stdin.close()  # ends the process
        await self._process.wait()
