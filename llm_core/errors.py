"""Everything that can go wrong in the LLM core, drawn first.

Errors cross the process boundary as ``(code, message)``; ``from_code`` turns them back into the
class that the client side raises.
"""


class LlmError(Exception):
    """Base of all errors of the LLM core. ``code`` is stable and fit for clients."""

    code = "llm_error"


class ModelLoadError(LlmError):
    """The model file is unreadable, incomplete, or of a kind we do not support."""

    code = "model_load_error"


class InvalidRequestError(LlmError):
    """The request can never be served: bad parameter, bad message, bad role."""

    code = "invalid_request"


class PromptTooLongError(InvalidRequestError):
    """The prompt does not fit into the model's context or the KV cache."""

    code = "context_length_exceeded"


class EngineBusyError(LlmError):
    """The waiting queue is full; the caller may retry later."""

    code = "engine_busy"


class RequestTimeoutError(LlmError):
    """The request was not done within its own ``timeout_ms``."""

    code = "request_timeout"


class InternalError(LlmError):
    """A fault of ours, or of a library, in serving one request; the log has the traceback."""

    code = "internal_error"


class EngineDiedError(LlmError):
    """The engine process ended while the request was running."""

    code = "engine_died"


_BY_CODE: dict[str, type[LlmError]] = {
    cls.code: cls
    for cls in (
        LlmError,
        ModelLoadError,
        InvalidRequestError,
        PromptTooLongError,
        EngineBusyError,
        RequestTimeoutError,
        InternalError,
        EngineDiedError,
    )
}


def is_fault(error: BaseException) -> bool:
    """Whether ``error`` is of the code that ran, rather than a wish to end the process. A panic of
    a Rust library is, though its class is not an Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def from_code(code: str, message: str) -> LlmError:
    """The exception for an error that arrived from the engine process."""
    return _BY_CODE.get(code, LlmError)(message)
