"""Field types of what clients send, and how a failed validation reads to a client.

The models of the Realtime API hold no unions: with one type per field the path of an error is the
path that the client wrote, as in ``session.audio.input.format.rate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError, PydanticKnownError
from pydantic_core.core_schema import CoreSchema, no_info_before_validator_function

from app.api.http.json_input import json_object
from app.errors import ClientError

MAX_OUTPUT_TOKENS = 4096
MAX_TEXT_CHARS = 100_000
_MAX_SHOWN_CHARS = 4096

# What fields of sessions and responses were called in the beta, and are called now.
_BETA_NAMES = {
    "modalities": "output_modalities",
    "voice": "audio.output.voice",
    "speed": "audio.output.speed",
    "output_audio_format": "audio.output.format",
    "input_audio_format": "audio.input.format",
    "input_audio_transcription": "audio.input.transcription",
    "input_audio_noise_reduction": "audio.input.noise_reduction",
    "turn_detection": "audio.input.turn_detection",
    "max_response_output_tokens": "max_output_tokens",
}


class WireModel(BaseModel):
    """Strict types; a field that we do not know is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, value: Any) -> Any:
        """Drop all unknown fields but the first: pydantic builds an error for each of them, and a
        client gets only one."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((name for name in value if name not in known), None)
        return {name: value[name] for name in (*known, unknown) if name in value}


class AtMost:
    """A bound on the elements of a list or the entries of a dict.

    It is checked before any of them is validated, and validation of a list stops at the first
    error. Put it next to the type: ``Annotated[list[X], AtMost(5)] | None``.
    """

    def __init__(self, most: int, *, least: int = 0) -> None:
        self._most = most
        self._least = least

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema: Any = handler(source)
        if schema["type"] == "list":
            schema["fail_fast"] = True
        elif schema["type"] != "dict":
            raise TypeError(f"{source} is neither a list nor a dict")
        schema["max_length"], schema["min_length"] = self._most, self._least
        return no_info_before_validator_function(self._check, schema)

    def _check(self, value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > self._most:
            is_list = isinstance(value, list)
            raise PydanticKnownError(
                "too_long",
                {
                    "field_type": "List" if is_list else "Dictionary",
                    "max_length": self._most,
                    "actual_length": len(value) if is_list else None,
                },
            )
        return value


WireT = TypeVar("WireT", bound=WireModel)


def unsupported(what: str) -> PydanticCustomError:
    """The error for a part of the protocol that this server does not offer."""
    return PydanticCustomError("unsupported_value", "{what}", {"what": what})


def invalid(message: str) -> PydanticCustomError:
    """The error for a value outside the protocol."""
    return PydanticCustomError("invalid_value", "{message}", {"message": message})


def null_is(default: Any) -> BeforeValidator:
    """``null`` clears the field: it becomes ``default``."""
    return BeforeValidator(lambda value: default if value is None else value)


def _only(allowed: tuple[Any, ...], what: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        # `True == 1` in Python; a boolean is not among the allowed unless it is listed as one.
        if any(value == item and type(value) is type(item) for item in allowed):
            return value
        raise unsupported(what)

    return check


def only(*allowed: Any, what: str) -> BeforeValidator:
    """A field of the protocol of which we offer only the ``allowed`` values."""
    return BeforeValidator(_only(allowed, what))


def _output_tokens(value: Any) -> Any:
    if value is None or value == "inf":
        return None
    if isinstance(value, str):
        raise invalid(f'expected an integer from 1 to {MAX_OUTPUT_TOKENS} or "inf"')
    if isinstance(value, bool) or not isinstance(value, int):
        raise PydanticCustomError("int_type", 'expected an integer or "inf"')
    if value < 1:
        raise PydanticCustomError("greater_than_equal", "expected at least 1")
    if value > MAX_OUTPUT_TOKENS:
        raise PydanticCustomError("less_than_equal", f"expected at most {MAX_OUTPUT_TOKENS}")
    return value


def _modalities(value: Any) -> Any:
    if value == ["audio", "text"] or value == ["text", "audio"]:
        raise invalid('["audio"] includes a transcript; "audio" and "text" cannot be combined')
    if value == []:
        raise invalid('expected ["audio"] or ["text"]')
    return value


def _voice_name(value: Any) -> Any:
    """A custom voice is given as an object with an id."""
    if isinstance(value, dict) and value.keys() == {"id"}:
        return value["id"]
    return value


Id = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.:-]+$")]
EventId = Annotated[str, StringConstraints(max_length=512)]
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT_CHARS)]
ShortText = Annotated[str, StringConstraints(max_length=256)]
VoiceName = Annotated[ShortText, BeforeValidator(_voice_name)]
# None: "inf", the server's own limit.
MaxOutputTokens = Annotated[int | None, BeforeValidator(_output_tokens)]
Modalities = Annotated[list[Literal["audio", "text"]], AtMost(16), BeforeValidator(_modalities)]


def to_client_error(error: ValidationError, prefix: str = "") -> ClientError:
    """The first failure, in the words and codes of the Realtime API."""
    details = error.errors(include_url=False, include_context=True)[0]
    return _describe(details, _path(details["loc"], prefix))


def parse_body(body: bytes, kind: type[WireT]) -> WireT:
    """A request's body, a JSON object. Raises ClientError, naming the parameter."""
    return checked(json_object(body), kind)


def checked(value: dict[str, Any], kind: type[WireT], prefix: str = "") -> WireT:
    """``value``, which the client calls ``prefix``, as a ``kind``. Raises ClientError, naming the
    parameter."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise to_client_error(error, prefix) from error


# Items come in several types; pydantic puts the type's name into the path of an error.
_ITEM_TAGS = ("message", "function_call", "function_call_output", "item_reference")


def _path(location: tuple[int | str, ...], prefix: str) -> str:
    path = prefix
    before: int | str = ""
    for step in location:
        is_tag = step in _ITEM_TAGS and (before == "item" or isinstance(before, int))
        before = step
        if is_tag:
            continue
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path += f".{step}" if path else step
    return path[:200]


def _beta_hint(param: str) -> str:
    """What a client made for the beta should say instead."""
    place, _, name = param.rpartition(".")
    if place not in ("session", "response") or name not in _BETA_NAMES:
        return ""
    return f" It is of the beta API; now it is '{place}.{_BETA_NAMES[name]}'."


def _describe(details: ErrorDetails, param: str) -> ClientError:
    kind, message, value = details["type"], details["msg"], details["input"]
    if kind == "missing":
        return _error(
            f"Missing required parameter: '{param}'.", "missing_required_parameter", param
        )
    if kind == "extra_forbidden":
        return _error(
            f"Unknown parameter: '{param}'.{_beta_hint(param)}", "unknown_parameter", param
        )
    if kind == "unsupported_value":
        return _error(f"Unsupported value for '{param}'. {message}", "unsupported_value", param)
    if kind == "union_tag_not_found":
        param = f"{param}.type"
        return _error(
            f"Missing required parameter: '{param}'.", "missing_required_parameter", param
        )
    if kind == "union_tag_invalid":
        param, given = f"{param}.type", details["ctx"]["tag"]
        if str(given).startswith("mcp_"):
            text = f"Unsupported value for '{param}': this server does not speak to MCP servers."
            return _error(text, "unsupported_value", param)
        expected = details["ctx"]["expected_tags"]
        text = f"Invalid value for '{param}': {shorten(given)}. Supported values are: {expected}."
        return _error(text, "invalid_value", param)
    if kind == "literal_error":
        expected = details["ctx"]["expected"]
        text = f"Invalid value for '{param}': {shorten(value)}. Supported values are: {expected}."
        return _error(text, "invalid_value", param)
    if kind.endswith("_type"):
        if message.startswith("Input should be"):  # pydantic's own words, which name its classes
            message = _EXPECTED_TYPES.get(kind, message)
        text = f"Invalid type for '{param}': {message}, but got {_json_type(value)} instead."
        return _error(text, "invalid_type", param)
    code = _LIMIT_CODES.get(kind, "invalid_value")
    if code.startswith("number"):
        code = code.replace("number", "decimal" if isinstance(value, float) else "integer")
    return _error(f"Invalid value for '{param}': {message}.", code, param)


_EXPECTED_TYPES = {
    "model_type": "expected an object",
    "model_attributes_type": "expected an object",
    "dict_type": "expected an object",
    "list_type": "expected an array",
    "tuple_type": "expected an array",
    "string_type": "expected a string",
    "int_type": "expected an integer",
    "float_type": "expected a number",
    "bool_type": "expected a boolean",
}
_LIMIT_CODES = {
    "greater_than": "number_below_min_value",
    "greater_than_equal": "number_below_min_value",
    "less_than": "number_above_max_value",
    "less_than_equal": "number_above_max_value",
    "string_too_long": "string_above_max_length",
    "string_too_short": "string_below_min_length",
    "too_long": "array_above_max_length",
    "too_short": "array_below_min_length",
}


def _error(message: str, code: str, param: str) -> ClientError:
    return ClientError(message, code=code, param=param or None)


def shorten(value: Any, limit: int = 80) -> str:
    """A JSON value as an error message shows it. Only the part that is shown is converted."""
    if isinstance(value, str):
        value = value[:limit]
    text = ""
    for piece in _repr_pieces(value):
        text += piece
        if len(text) > limit:
            return text[: limit - 3] + "..."
    return text


def _repr_pieces(value: Any) -> Iterator[str]:
    """``repr(value)``, piece by piece."""
    if isinstance(value, list):
        yield "["
        for index, item in enumerate(value):
            yield ", " if index else ""
            yield from _repr_pieces(item)
        yield "]"
    elif isinstance(value, dict):
        yield "{"
        for index, (name, item) in enumerate(value.items()):
            yield ", " if index else ""
            yield from _repr_pieces(name)
            yield ": "
            yield from _repr_pieces(item)
        yield "}"
    else:
        yield repr(value[:_MAX_SHOWN_CHARS] if isinstance(value, str) else value)


def _json_type(value: Any) -> str:
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a decimal",
        str: "a string",
        list: "an array",
        dict: "an object",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)
