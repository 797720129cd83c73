"""The exception tree of the application, drawn first.

Foreign errors are mapped to these once, at the boundary where they enter. ``code`` is stable and
goes to clients as it is; ``param`` names the offending field when there is one.
"""

from __future__ import annotations


class ParleyError(Exception):
    """Base of all errors that Parley raises on purpose."""

    code = "parley_error"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.param = param


class ConfigError(ParleyError):
    """A setting is missing or has a value that cannot work."""

    code = "invalid_config"


class ModelStoreError(ParleyError):
    """A model cannot be named, fetched, or verified."""

    code = "model_unavailable"


class ClientError(ParleyError):
    """The client sent something that cannot be honoured. The session goes on."""

    code = "invalid_request_error"


class AudioInputError(ClientError):
    """Audio that cannot be decoded."""

    code = "invalid_audio"


class ServiceError(ParleyError):
    """A stage of the pipeline failed. The turn ends; the session goes on."""

    code = "server_error"


class UnavailableError(ServiceError):
    """The server takes nobody at the moment (HTTP 503). ``retry_after_s``: when it may again."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class RecognitionError(ServiceError):
    """Speech recognition failed."""

    code = "transcription_failed"


class SynthesisError(ServiceError):
    """Speech synthesis failed."""

    code = "synthesis_failed"


class GenerationError(ServiceError):
    """The LLM core failed or refused."""

    code = "generation_failed"


class TurnTimeoutError(ServiceError):
    """An answer that did not begin in time."""

    code = "timed_out"
