"""The body of ``POST /v1/chat/completions``: validation, and the engine's request for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from app.api.chat.messages import Messages, Schema, Tools, to_messages, to_tools, wrong
from app.api.validation import AtMost, WireModel, invalid, null_is, only, parse_body
from app.digits import whole_number
from llm_core import (
    ChatMessage,
    ChoiceGuide,
    Guide,
    JsonGuide,
    RegexGuide,
    SamplingParams,
    ToolGuide,
    ToolSpec,
)

_INT64 = 2**63
_CHOICE_MODES = ("none", "auto", "required")


class JsonSchema(WireModel):
    """``response_format.json_schema``. In the request its schema is called ``schema``."""

    name: str
    description: str | None = None
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(WireModel):
    """``{"type": "text" | "json_object" | "json_schema", "json_schema": ...}``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(WireModel):
    """What OpenAI has no words for, in those of vLLM: one of a pattern, a choice, a schema."""

    regex: str | None = None
    choice: Annotated[list[str], AtMost(4096)] | None = None
    json_: Annotated[Schema | None, Field(alias="json")] = None


class StreamOptions(WireModel):
    """``include_usage``: a last chunk with the counts; the other is vLLM's: in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


def _strings(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _tool_choice(value: Any) -> Any:
    """A mode, or ``{"type": "function", "function": {"name": ...}}`` as the name alone."""
    if value is None or value in _CHOICE_MODES:
        return value
    match value:
        case {"type": "function", "function": {"name": str(name)}}:
            return f"function:{name}"
    raise invalid(
        'expected "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
    )


Penalty = Annotated[float, Field(ge=-2.0, le=2.0), null_is(0.0)]


class ChatRequest(WireModel):
    """The fields that we serve. Those that ask for nothing we would have to do are taken and
    ignored (``user`` and the like); all others are refused by name."""

    model: str
    messages: Messages
    temperature: Annotated[float | None, Field(ge=0.0, le=2.0)] = None
    top_p: Annotated[float | None, Field(gt=0.0, le=1.0)] = None
    seed: Annotated[int | None, Field(ge=-_INT64, lt=_INT64)] = None
    stop: Annotated[Annotated[list[str], AtMost(1024)] | None, BeforeValidator(_strings)] = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    n: Annotated[int | None, only(None, 1, what="Only 1: ask again for another answer.")] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[str, float], AtMost(1024)] | None = None
    response_format: ResponseFormat | None = None
    tools: Tools = None
    tool_choice: Annotated[str | None, BeforeValidator(_tool_choice)] = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Of other servers of this API; load tools use them.
    top_k: Annotated[int, Field(ge=0, lt=_INT64), null_is(0)] = 0
    min_p: Annotated[float, Field(ge=0.0, le=1.0), null_is(0.0)] = 0.0
    repetition_penalty: Annotated[float | None, Field(ge=0.01, le=100.0)] = None
    min_tokens: Annotated[int, Field(ge=0, lt=_INT64), null_is(0)] = 0
    ignore_eos: Annotated[bool, null_is(default=False)] = False
    structured_outputs: StructuredOutputs | None = None

    user: str | None = None
    metadata: Annotated[dict[str, Any], AtMost(16)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Annotated[
        str | None, only(None, "auto", "default", what="Only 'auto' and 'default'.")
    ] = None
    store: Annotated[bool | None, only(None, False, what="Nothing is stored here.")] = None
    modalities: Annotated[
        Annotated[list[str], AtMost(1)] | None, only(None, ["text"], what="Only ['text'].")
    ] = None
    functions: Annotated[None, only(None, what="Use 'tools'.")] = None
    function_call: Annotated[None, only(None, what="Use 'tool_choice'.")] = None


@dataclass(frozen=True, slots=True)
class ChatDefaults:
    """How the operator lets the model talk; it holds for requests that name no temperature.

    OpenAI's own defaults (temperature 1, the whole distribution) suit models a thousand times as
    large: small ones lose the thread. Who names a temperature knows how to sample, and gets the
    rest as OpenAI has it: nothing cut off, nothing penalised.
    """

    temperature: float
    top_p: float
    repetition_penalty: float


_OPENAI = ChatDefaults(temperature=1.0, top_p=1.0, repetition_penalty=1.0)


@dataclass(frozen=True, slots=True)
class Chat:
    """A request as the engine takes it, and how its answer is to be given."""

    model: str
    messages: list[ChatMessage]
    params: SamplingParams
    tools: tuple[ToolSpec, ...]  # those whose calls are looked for in the answer
    stream: bool
    usage_at_end: bool
    usage_always: bool


def parse_chat(body: bytes, context_len: int, defaults: ChatDefaults) -> Chat:
    """Raises ClientError, naming the parameter."""
    return _to_chat(parse_body(body, ChatRequest), context_len, defaults)


def _to_chat(request: ChatRequest, context_len: int, defaults: ChatDefaults) -> Chat:
    if request.stream_options is not None and not request.stream:
        raise wrong("stream_options", "only allowed when 'stream' is true")
    if request.top_logprobs is not None and not request.logprobs:
        raise wrong("top_logprobs", "only allowed when 'logprobs' is true")
    tools = _offered(request)
    options = request.stream_options or StreamOptions()
    if request.temperature is not None:
        defaults = _OPENAI
    params = SamplingParams(
        max_tokens=_max_tokens(request, context_len),
        min_tokens=request.min_tokens,
        temperature=_given(request.temperature, defaults.temperature),
        top_k=request.top_k,
        top_p=_given(request.top_p, defaults.top_p),
        min_p=request.min_p,
        seed=request.seed,
        repetition_penalty=_given(request.repetition_penalty, defaults.repetition_penalty),
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        logit_bias=_biases(request.logit_bias or {}),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        stop=tuple(request.stop or ()),
        ignore_eos=request.ignore_eos,
        guide=_guide(request, tools),
    )
    return Chat(
        model=request.model,
        messages=to_messages(request.messages, tools),
        params=params,
        tools=tools,
        stream=bool(request.stream),
        usage_at_end=bool(options.include_usage),
        usage_always=bool(options.continuous_usage_stats),
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _max_tokens(request: ChatRequest, context_len: int) -> int:
    """Without a wish the answer may fill the context."""
    given = [
        (name, value)
        for name in ("max_completion_tokens", "max_tokens")
        if (value := getattr(request, name)) is not None
    ]
    if len({value for _, value in given}) > 1:
        raise wrong("max_tokens", "give it or 'max_completion_tokens', not both")
    for name, value in given:
        if value > context_len:
            raise wrong(
                name, f"{value} is too large: the context of this model holds {context_len} tokens"
            )
    return given[0][1] if given else context_len


def _biases(biases: dict[str, float]) -> dict[int, float]:
    found = {}
    for name, bias in biases.items():
        token_id = whole_number(name, max_digits=9)  # enough for any token there is
        if token_id is None:
            raise wrong("logit_bias", f"{name[:40]!r} is no token id")
        found[token_id] = bias
    return found


def _offered(request: ChatRequest) -> tuple[ToolSpec, ...]:
    """The tools that the model may use at all."""
    tools = to_tools(request.tools or ())
    choice = request.tool_choice
    if choice in (None, "none"):
        return () if choice == "none" else tools
    if not tools:
        raise wrong("tool_choice", "only allowed when 'tools' are given")
    assert choice is not None, "none of the other cases"
    if choice.startswith("function:"):
        named = tuple(tool for tool in tools if tool.name == choice.partition(":")[2])
        if not named:
            raise wrong("tool_choice.function.name", "not a function of 'tools'")
        return named
    return tools


def _guide(request: ChatRequest, tools: tuple[ToolSpec, ...]) -> Guide | None:
    text = _text_guide(request)
    if not tools:
        return text
    if text is not None and not isinstance(text, JsonGuide):
        raise wrong("structured_outputs", "a pattern or a choice leaves no room for 'tools'")
    is_named = (request.tool_choice or "").startswith("function:")
    return ToolGuide(
        tools=tools,
        required=is_named or request.tool_choice == "required",
        parallel=request.parallel_tool_calls is not False and not is_named,
        text=text,
    )


def _text_guide(request: ChatRequest) -> Guide | None:
    guides: list[Guide] = []
    wanted, asked = request.response_format, request.structured_outputs
    if wanted is not None and wanted.type == "json_object":
        guides.append(JsonGuide())
    if wanted is not None and wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise wrong(
                "response_format.json_schema",
                "needed with the type 'json_schema'",
                code="missing_required_parameter",
            )
        schema = json.dumps(wanted.json_schema.schema_, ensure_ascii=False)
        guides.append(JsonGuide(schema=schema, strict=bool(wanted.json_schema.strict)))
    if asked is not None:
        if asked.regex is not None:
            guides.append(RegexGuide(pattern=asked.regex))
        if asked.choice is not None:
            guides.append(ChoiceGuide(options=tuple(asked.choice)))
        if asked.json_ is not None:
            guides.append(JsonGuide(schema=json.dumps(asked.json_, ensure_ascii=False)))
    if len(guides) > 1:
        raise wrong("structured_outputs", "more than one format is asked for")
    return guides[0] if guides else None
