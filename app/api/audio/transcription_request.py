"""The form of ``POST /v1/audio/transcriptions``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, StringConstraints

from app.api.http.body import BodyTooLargeError, MediaTypeError
from app.api.http.multipart import FormField, form_fields
from app.api.model_names import Names, check_language
from app.api.models import UnknownModelError
from app.api.validation import (
    AtMost,
    ShortText,
    Text,
    WireModel,
    checked,
    invalid,
    only,
    unsupported,
)
from app.errors import ClientError
from audio.language import language_code

OutputFormat = Literal["json", "text", "verbose_json", "srt", "vtt"]
# Fields that may be given several times are lists; clients write them with brackets.
_LISTS = ("timestamp_granularities", "include")


def _temperature(value: Any) -> Any:
    if value is None or value.strip() in ("0", "0.0", "0.00"):
        return None
    raise unsupported("Only 0: the recogniser takes what it believes most.")


def _flag(value: Any) -> Any:
    words = {"true": True, "false": False, "1": True, "0": False}
    if value is None or value.lower() not in words:
        raise invalid('expected "true" or "false"')
    return words[value.lower()]


class TranscriptionForm(WireModel):
    """The fields beside the file, all of which are text."""

    model: ShortText
    language: Annotated[str | None, StringConstraints(min_length=2, max_length=16)] = None
    prompt: Text | None = None
    response_format: OutputFormat = "json"
    temperature: Annotated[None, BeforeValidator(_temperature)] = None
    timestamp_granularities: Annotated[list[Literal["word", "segment"]], AtMost(16)] = []
    stream: Annotated[bool, BeforeValidator(_flag)] = False
    include: Annotated[list[str], AtMost(0), only([], what="Nothing more can be included.")] = []
    chunking_strategy: Annotated[
        str | None, only(None, "auto", what="Only 'auto': files are cut at pauses.")
    ] = None


@dataclass(frozen=True, slots=True)
class TranscriptionRequest:
    """A checked form. ``wants_lines``: parts of the text with their times."""

    content: bytes = field(repr=False)
    language: str | None
    prompt: str | None
    response_format: OutputFormat
    wants_words: bool
    wants_lines: bool
    stream: bool


def parse_transcription(
    content_type: str, body: bytes, names: Names, max_file_bytes: int
) -> TranscriptionRequest:
    """Raises ClientError, naming the parameter."""
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        raise MediaTypeError(
            "Send the file as multipart/form-data with the fields 'file' and 'model'."
        )
    content: bytes | None = None
    values: dict[str, Any] = {}
    for one in form_fields(content_type, body):
        if one.name == "file" and content is None:
            content = one.value
        else:
            _add(values, one)
    if content is None:
        raise ClientError(
            "Missing required parameter: 'file'.", code="missing_required_parameter", param="file"
        )
    if not content:
        raise ClientError("Invalid 'file': it is empty.", code="invalid_file", param="file")
    if len(content) > max_file_bytes:
        raise BodyTooLargeError(f"The file may have at most {max_file_bytes} bytes.", param="file")
    form = checked(values, TranscriptionForm)
    _check_names(form, names)
    granularities = set(form.timestamp_granularities)
    is_verbose = form.response_format == "verbose_json"
    if granularities and not is_verbose:
        raise ClientError(
            "Invalid value for 'timestamp_granularities': only with the response_format "
            "'verbose_json'.",
            code="invalid_value",
            param="timestamp_granularities",
        )
    if form.stream and form.response_format not in ("json", "text"):
        raise ClientError(
            "Unsupported value for 'stream': only with the response_format 'json' or 'text'.",
            code="unsupported_value",
            param="stream",
        )
    lines = form.response_format in ("srt", "vtt") or (is_verbose and granularities != {"word"})
    return TranscriptionRequest(
        content=content,
        language=None if form.language is None else language_code(form.language),
        prompt=form.prompt,
        response_format=form.response_format,
        wants_words="word" in granularities,
        wants_lines=lines,
        stream=form.stream,
    )


def _add(values: dict[str, Any], one: FormField) -> None:
    name = one.name.removesuffix("[]")
    try:
        text = one.value.decode()
    except UnicodeDecodeError as error:
        raise ClientError(f"'{name}' is not UTF-8.", code="invalid_value", param=name) from error
    if name in _LISTS:
        values.setdefault(name, []).append(text)
    elif name in values or name == "file":
        raise ClientError(
            f"Invalid value for '{name}': it is given twice.", code="invalid_value", param=name
        )
    else:
        values[name] = text


def _check_names(form: TranscriptionForm, names: Names) -> None:
    if not names.is_transcriber(form.model):
        raise UnknownModelError(
            f"The model {form.model[:100]!r} does not transcribe here. This server has "
            f"{names.transcriber!r}, for which OpenAI's names ('whisper-1') stand as well.",
            param="model",
        )
    if form.language is not None:
        check_language(names, form.language, "language")
