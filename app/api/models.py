"""``GET /v1/models``, and by which names clients may ask for the loaded language model."""

from __future__ import annotations

import re
import time
from typing import Any

from fastapi import APIRouter, Request

from app.api.model_names import OWN_NAME, Names
from app.errors import ClientError
from app.routing import LlmEngine

# Clients and load tools send OpenAI's names without being asked; as in the Realtime API they stand
# for what is loaded here. Answers carry the true name.
_OPENAI_CHAT = re.compile(r"(chat)?gpt-[a-z0-9.-]+")


class UnknownModelError(ClientError):
    """No such model (HTTP 404)."""

    code = "model_not_found"


def check_model(name: str, engine: LlmEngine) -> None:
    """Raises UnknownModelError unless ``name`` is ``parley``, the loaded model, or OpenAI's."""
    loaded = engine.info.name
    if name not in (OWN_NAME, loaded) and not _OPENAI_CHAT.fullmatch(name):
        raise UnknownModelError(
            f"The model {name[:100]!r} does not exist here. This server has {loaded!r}, which also "
            f"answers to {OWN_NAME!r}.",
            param="model",
        )


def models_router(engine: LlmEngine, names: Names) -> APIRouter:
    """``GET /v1/models`` and ``GET /v1/models/{name}``. The language model comes first: some
    clients take the first."""
    router = APIRouter()
    started_s = int(time.time())

    def task_of(name: str) -> str:
        """In the words of the Hugging Face hub. Raises UnknownModelError."""
        if name != OWN_NAME and names.is_transcriber(name):
            return "automatic-speech-recognition"
        if name != OWN_NAME and names.is_speech_model(name):
            return "text-to-speech"
        check_model(name, engine)
        return "text-generation"

    def described(name: str) -> dict[str, Any]:
        task = task_of(name)
        about = {"id": name, "object": "model", "created": started_s, "owned_by": "parley"}
        if task == "text-generation":
            about["max_model_len"] = engine.info.context_len  # where load tools look for it
        return {**about, "task": task}

    @router.get("/v1/models")
    async def list_models(request: Request) -> dict[str, Any]:
        request.app.state.gatekeeper.check(request.headers)
        loaded = (engine.info.name, OWN_NAME, names.transcriber, names.voice)
        return {"object": "list", "data": [described(name) for name in dict.fromkeys(loaded)]}

    @router.get("/v1/models/{name:path}")
    async def get_model(request: Request, name: str) -> dict[str, Any]:
        request.app.state.gatekeeper.check(request.headers)
        return described(name)

    return router
