"""The names by which clients may call what is loaded here, and the errors for all others."""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.datastructures import Headers

from app.config import Settings
from app.errors import ClientError
from audio.language import language_code

# Clients send OpenAI's names without being asked, so these stand for whatever is loaded here.
OPENAI_VOICES = frozenset(
    ("alloy", "ash", "ballad", "cedar", "coral", "echo", "marin", "sage", "shimmer", "verse")
)
# Its older voices are known to the endpoint for speech only.
_OPENAI_READERS = OPENAI_VOICES.union(("fable", "nova", "onyx"))
_OPENAI_SPEECH = re.compile(r"tts-1(-hd)?|gpt-[a-z0-9.-]*tts[a-z0-9.-]*")
_OPENAI_TRANSCRIBERS = re.compile(r"whisper-1|gpt-[a-z0-9.-]*(transcribe|whisper)[a-z0-9.-]*")
_OPENAI_REALTIME = re.compile(r"gpt-[a-z0-9.-]*realtime[a-z0-9.-]*")
OWN_NAME = "parley"


def is_beta(headers: Headers) -> bool:
    """Whether a client says that it was made for the beta: by header, or (browsers) subprotocol."""
    named = headers.get("openai-beta", "") + " " + headers.get("sec-websocket-protocol", "")
    return "realtime=v1" in named or "openai-beta.realtime-v1" in named


@dataclass(frozen=True, slots=True)
class Names:
    """What is loaded, by the names that clients may use for it."""

    model: str
    transcriber: str
    voice: str
    languages: tuple[str, ...]

    @classmethod
    def of(cls, settings: Settings, languages: tuple[str, ...]) -> Names:
        """The names in ``settings``, without the scheme of the model store; ``languages`` are the
        codes of those that the recogniser knows."""
        models = (settings.llm_model, settings.asr_model, settings.tts_model)
        llm, asr, tts = (name.rsplit(":", 1)[-1].rsplit("/", 1)[-1] for name in models)
        return cls(llm, asr, tts, languages)

    def is_model(self, name: str) -> bool:
        """``parley``, the loaded model, or an alias of OpenAI (any gpt-*realtime*)."""
        return name in (OWN_NAME, self.model) or bool(_OPENAI_REALTIME.fullmatch(name))

    def is_transcriber(self, name: str) -> bool:
        """``parley``, the loaded recogniser, or an alias of OpenAI (gpt-*transcribe*)."""
        return name in (OWN_NAME, self.transcriber) or bool(_OPENAI_TRANSCRIBERS.fullmatch(name))

    def is_speech_model(self, name: str) -> bool:
        """``parley``, the loaded voice, or an alias of OpenAI (tts-1, gpt-*tts*)."""
        return name in (OWN_NAME, self.voice) or bool(_OPENAI_SPEECH.fullmatch(name))

    def is_reader(self, name: str) -> bool:
        """As ``is_voice``, and the voices that only the endpoint for speech has."""
        return self.is_voice(name) or name in _OPENAI_READERS

    def is_voice(self, name: str) -> bool:
        """``parley``, the loaded voice, or one of OpenAI's voice names."""
        return name in (OWN_NAME, self.voice) or name in OPENAI_VOICES


def check_transcription(names: Names, model: str | None, language: str | None) -> None:
    """Raise ClientError for a recogniser or a language that is not here."""
    path = "session.audio.input.transcription"
    if language:
        check_language(names, language, f"{path}.language")
    if model is not None and not names.is_transcriber(model):
        raise ClientError(
            f"Invalid value for '{path}.model': {model!r} is not loaded. Supported values "
            f"are: {names.transcriber!r}, and OpenAI's names, which stand for it.",
            code="invalid_value",
            param=f"{path}.model",
        )


def check_language(names: Names, language: str, param: str) -> None:
    """Raise ClientError for a language that the recogniser does not know."""
    if language_code(language) in names.languages:
        return
    known = "English only" if names.languages == ("en",) else ", ".join(names.languages)
    raise ClientError(
        f"Unsupported value for '{param}': {language!r}. {names.transcriber!r} knows {known}.",
        code="unsupported_value",
        param=param,
    )


def check_voice(names: Names, voice: str, param: str) -> None:
    """Raise ClientError for a voice that is neither loaded nor an alias."""
    if not names.is_voice(voice):
        raise ClientError(
            f"Invalid value for '{param}': {voice!r}. Supported values are: {names.voice!r}, and "
            f"{', '.join(sorted(OPENAI_VOICES))}, which stand for it.",
            code="invalid_value",
            param=param,
        )


def model_not_found(names: Names, model: str, param: str) -> ClientError:
    """The error for a model that this server does not have."""
    return ClientError(
        f"The model {model[:100]!r} does not exist on this server. Supported values are: "
        f"{names.model!r}, {OWN_NAME!r}, and OpenAI's Realtime models, which stand for it.",
        code="model_not_found",
        param=param,
    )
