"""Settings, validated at start. Each field is set by the environment variable ``PARLEY_<NAME>``.

Defaults suit two CPU cores and the embedded models. docs/configuration.md is generated from this
class: ``parley config --markdown``.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.errors import ConfigError

_PREFIX = "PARLEY_"
# Names of settings whose values are not to be seen in a terminal or a log.
_SECRET = ("KEY", "TOKEN", "CREDENTIAL", "ENDPOINT", "SERVERS")
_MAX_TOLD_CHARS = 300

# Chosen among five by what the embedded model answers: it keeps to English and to short answers.
DEFAULT_INSTRUCTIONS = (
    "You are a helpful AI assistant named Parley. You speak with the user. "
    "Keep every answer short: one or two plain sentences."
)


def _split(value: object) -> object:
    """A list in an environment variable: names with commas between them, or a JSON list."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return [name.strip() for name in value.split(",") if name.strip()]


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


Name = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
# NoDecode: pydantic-settings would insist on JSON.
Names = Annotated[tuple[Name, ...], NoDecode, BeforeValidator(_split)]


# What a plain turn takes on two cores with the embedded models (docs/benchmarks.md), and some air.
DEFAULT_STAGES_MS = {
    "endpoint": 600.0,
    "asr": 50.0,
    "queue": 20.0,
    "prefill": 50.0,
    "decode": 60.0,
    "tts": 200.0,
    "send": 20.0,
}


def _stages(value: object) -> object:
    """``asr=150,tts=200``, or a JSON object; stages that are not named keep their defaults."""
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        pairs = [part.partition("=") for part in value.split(",") if part.strip()]
        value = {name.strip(): ms.strip() for name, _, ms in pairs}
    elif isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, dict):
        raise ValueError("expected stage=milliseconds pairs with commas between them")
    if unknown := set(value) - set(DEFAULT_STAGES_MS):
        raise ValueError(
            f"there is no stage {sorted(unknown)[0]!r}; there are {', '.join(DEFAULT_STAGES_MS)}"
        )
    return {**DEFAULT_STAGES_MS, **value}


Milliseconds = Annotated[float, Field(ge=0.0, le=60_000.0)]
StagesMs = Annotated[dict[str, Milliseconds], NoDecode, BeforeValidator(_stages)]
Policy = Literal[
    "short_first_clause", "filler", "smaller_model", "shorter_answer", "partial_context"
]
TurnDetectionKind = Annotated[Literal["server_vad", "semantic_vad"], BeforeValidator(_lower)]
Policies = Annotated[tuple[Policy, ...], NoDecode, BeforeValidator(_split)]


class Settings(BaseSettings):
    """All settings of one server. Frozen: nothing changes after start."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, frozen=True, extra="ignore", allow_inf_nan=False
    )

    @property
    def compiled_dir(self) -> Path:
        """Where compiled code is kept."""
        return self.native_dir or self.home / "native"

    # Files
    home: Path = Field(
        default_factory=lambda: Path.home() / ".parley",
        description="Directory for models, traces, recordings and compiled code.",
    )
    native_dir: Path | None = Field(
        default=None,
        description=(
            "Directory for compiled code; it must belong to the server's user. Unset: `native` "
            "in PARLEY_HOME."
        ),
    )

    # Network and access
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(
        default=8080, ge=0, le=65535, description="TCP port to listen on; 0 lets the system choose."
    )
    tls_cert: Path | None = Field(
        default=None,
        description=(
            "TLS certificate chain (PEM). With PARLEY_TLS_KEY the server speaks https and wss."
        ),
    )
    tls_key: Path | None = Field(
        default=None, description="Private key of the TLS certificate (PEM)."
    )
    api_keys: Names = Field(
        default=(),
        repr=False,
        description="API keys, separated by commas. Empty: no key is required.",
    )
    allowed_origins: Names = Field(
        default=(),
        description="Browser origins besides the server's own that may connect; '*' allows any.",
    )
    allowed_hosts: Names = Field(
        default=(),
        description=(
            "Host names under which clients reach this server, besides localhost, IP addresses "
            "and PARLEY_HOST; '*' allows any."
        ),
    )

    # Logging
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)] = (
        Field(default="info", description="Least severe level that is logged.")
    )
    log_format: Annotated[Literal["text", "json"], BeforeValidator(_lower)] = Field(
        default="text",
        description="Log format; json writes one object per line for log collectors.",
    )
    log_transcripts: bool = Field(default=False, description="Write what callers say to the log.")

    # Models
    llm_model: str = Field(
        default="package:smollm2-135m-instruct",
        description=(
            "Language model: package:NAME, hf:org/name, or the path of a GGUF file or a Hugging "
            "Face directory."
        ),
    )
    asr_model: str = Field(
        default="package:whisper-tiny.en",
        description=(
            "Speech recognition model (CTranslate2 Whisper): package:NAME, hf:org/name, or a path."
        ),
    )
    asr_language: str = Field(
        default="",
        description=(
            "Spoken language (es, en-US) of sessions that name none. Empty: a multilingual model "
            "detects it turn by turn."
        ),
    )
    tts_model: str = Field(
        default="package:piper-en_US-joe-medium",
        description="Speech synthesis voice (Piper): package:NAME, hf:org/name, or a path.",
    )
    turn_model: str = Field(
        default="",
        description=(
            "Acoustic end-of-turn model for semantic_vad (smart-turn v3, ONNX): "
            "package:smart-turn-v3.2 or a path. Useful with an ASR model that has no calibrated "
            "end-of-turn classifier. Empty: none."
        ),
    )

    # Canary roll-out
    llm_sha256: str = Field(
        default="",
        description=(
            "SHA-256 that the language model must have; otherwise the server does not start."
        ),
    )
    canary: str = Field(
        default="",
        description=(
            "Second engine for a canary roll-out: MODEL,name=value,... with the options of "
            "`parley bench gate`."
        ),
    )
    canary_share: float = Field(
        default=0.1,
        ge=0.0,
        le=0.9,
        description="Share of the conversations that the canary engine answers.",
    )
    canary_sha256: str = Field(default="", description="SHA-256 that the canary's model must have.")
    canary_patience_ms: int = Field(
        default=1500,
        ge=50,
        le=60_000,
        description=(
            "Time without a token after which a request moves from the canary to the main engine."
        ),
    )

    # Engine
    llm_threads: int = Field(
        default_factory=lambda: min(2, os.cpu_count() or 1),
        ge=1,
        le=256,
        description=(
            "Compute threads of the engine. Those of the compiled decoder sleep between steps."
        ),
    )
    llm_max_sequences: int = Field(
        default=8, ge=1, le=1024, description="Maximum number of sequences in one engine step."
    )
    llm_max_context: int | None = Field(
        default=4096,
        ge=64,
        description=(
            "Maximum number of tokens in prompt and reply together, at most the model's own "
            "context length."
        ),
    )
    llm_policy: Annotated[Literal["deadline", "fcfs", "priority"], BeforeValidator(_lower)] = Field(
        default="deadline",
        description="Order in which the scheduler serves requests; deadline suits callers.",
    )
    llm_backend: Annotated[
        Literal["auto", "triton", "native", "torch"], BeforeValidator(_lower)
    ] = Field(
        default="auto",
        description=(
            "Back end of the language model; auto takes a GPU where there is one, then compiled "
            "code, then torch."
        ),
    )
    llm_tensor_parallel: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Number of GPUs of this machine that share the model (tensor parallelism).",
    )
    llm_overlap_steps: bool = Field(
        default=True, description="GPU only: schedule and launch the next step while one runs."
    )
    llm_overlap_rows: int = Field(
        default=512,
        ge=0,
        description=(
            "Tensor parallelism: steps with at least this many tokens overlap all-reduce and "
            "compute; 0 disables it."
        ),
    )
    llm_torch_compile: bool = Field(
        default=False,
        description=(
            "GPU only: use torch.compile for the operations outside the kernels (the logit soft "
            "cap of Gemma 2)."
        ),
    )
    llm_kv_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "int8", "fp8"], BeforeValidator(_lower)
    ] = Field(
        default="auto",
        description=(
            "Data type of the KV cache. auto: bfloat16 on GPUs and in compiled code, else "
            "float32; fp8 needs a GPU."
        ),
    )
    llm_max_step_ms: int = Field(
        default=150,
        ge=10,
        le=10_000,
        description=(
            "Maximum time of one engine step, and so the longest delay that prefill may cause to "
            "running replies."
        ),
    )
    llm_attention_window: int | None = Field(
        default=None,
        ge=16,
        description=(
            "Sliding window: tokens attend to this many last tokens and to the first "
            "PARLEY_LLM_ATTENTION_SINKS. Unset: to all."
        ),
    )
    llm_attention_sinks: int = Field(
        default=64,
        ge=0,
        description=(
            "Number of attention sinks: first tokens of a sequence that stay visible beside the "
            "sliding window."
        ),
    )
    llm_standby: bool = Field(
        default=True,
        description=(
            "Keep a second engine process without a model (160 MB), so that a crashed engine is "
            "replaced faster."
        ),
    )
    llm_hang_timeout_s: float = Field(
        default=10.0,
        ge=0.0,
        description=(
            "Time without a heartbeat after which the engine process is replaced; 0: never."
        ),
    )
    llm_speculation: str = Field(
        default="auto",
        min_length=1,
        description=(
            "Speculative decoding: auto (the draft head that comes with the model, where "
            "compiled code runs it on a CPU), off, ngram, or the path of a draft head or of a "
            "draft model."
        ),
    )
    llm_speculation_optional: bool = Field(
        default=False,
        description=(
            "Start without speculative decoding when the draft head does not fit the model."
        ),
    )
    llm_draft_tokens: int = Field(
        default=16, ge=1, le=60, description="Maximum number of draft tokens in a step."
    )
    llm_draft_depth: int = Field(
        default=5, ge=1, le=16, description="Maximum depth of a draft tree."
    )
    llm_draft_width: int = Field(
        default=4,
        ge=1,
        le=8,
        description=(
            "Branches of a draft tree, where verification of further tokens is nearly free; 1: a "
            "chain."
        ),
    )

    # Speech workers
    asr_threads: int = Field(
        default=1, ge=1, le=64, description="Compute threads of one recognition."
    )
    tts_threads: int = Field(
        default=1, ge=1, le=64, description="Compute threads of one synthesis."
    )
    speech_workers: int = Field(
        default=2, ge=1, le=64, description="Worker threads that run ASR and TTS jobs."
    )

    # Replies
    instructions: str = Field(
        default=DEFAULT_INSTRUCTIONS, description="System prompt of sessions that set none."
    )
    temperature: float = Field(
        default=0.2, ge=0.0, le=2.0, description="Sampling temperature of replies."
    )
    top_p: float = Field(
        default=0.9, gt=0.0, le=1.0, description="Nucleus sampling threshold of replies."
    )
    repetition_penalty: float = Field(
        default=1.05,
        ge=1.0,
        le=2.0,
        description="Repetition penalty of replies; small models repeat themselves without one.",
    )
    max_reply_tokens: int = Field(
        default=160,
        ge=1,
        le=4096,
        description="Maximum number of tokens of a reply that names no limit.",
    )
    summarise_forgotten: bool = Field(
        default=False,
        description=(
            "Have the model summarise turns that no longer fit its context. Not for small models."
        ),
    )

    # Tools and turn taking
    turn_detection: TurnDetectionKind = Field(
        default="semantic_vad",
        description=(
            "Turn detection of sessions that set none: semantic_vad ends turns by words and "
            "voice, server_vad by silence."
        ),
    )
    tools: str | None = Field(
        default=None,
        description="Python module with tools for the model: 'module' or 'module:a,b'.",
    )
    tool_filler: str = Field(
        default="One moment.", description="Phrase spoken while a tool takes long; empty: none."
    )
    tool_filler_ms: int = Field(
        default=800, ge=0, le=60_000, description="Time after which the tool filler is spoken."
    )
    max_tool_rounds: int = Field(
        default=4,
        ge=1,
        le=32,
        description=(
            "Maximum number of model calls in one response that run the server's own tools."
        ),
    )
    vad_threshold: float = Field(
        default=0.5,
        gt=0.0,
        lt=1.0,
        description="Speech probability above which the VAD detects a voice.",
    )
    vad_prefix_padding_ms: int = Field(
        default=300, ge=0, le=5000, description="Audio kept from before the start of speech."
    )
    vad_silence_ms: int = Field(
        default=500, ge=100, le=10_000, description="Silence that ends a turn under server_vad."
    )
    eager_silence_ms: int = Field(
        default=32,
        ge=30,
        le=10_000,
        description=(
            "Silence after which a transcript is attempted before the end of turn is confirmed."
        ),
    )
    eager_reply: bool = Field(
        default=True,
        description="Eager generation: start the reply before the end of turn is confirmed.",
    )
    eager_max_generating: int = Field(
        default=2,
        ge=1,
        description="Number of responses in generation at which eager generation is disabled.",
    )
    partial_transcripts: bool = Field(
        default=True, description="Transcribe while the caller speaks, when there is compute time."
    )
    max_turn_s: float = Field(
        default=60.0, ge=1.0, le=600.0, description="Maximum length of a user turn."
    )
    playout_lead_ms: int = Field(
        default=1000,
        ge=60,
        le=60_000,
        description="Audio sent to WebSocket clients ahead of its playout time.",
    )

    # Limits
    max_sessions: int = Field(
        default=16,
        ge=1,
        description=(
            "Maximum number of concurrent sessions; further clients are refused with Retry-After."
        ),
    )
    max_sessions_per_minute: int = Field(
        default=240,
        ge=1,
        description=(
            "New sessions per minute for one API key, or for one address where no key is required."
        ),
    )
    max_messages_per_s: int = Field(
        default=1000,
        ge=50,
        description=(
            "Client messages per second for one API key; a message counts once per 16 KiB. "
            "Beyond it reading is throttled."
        ),
    )
    max_message_bytes: int = Field(
        default=16 * 1024 * 1024,
        ge=64 * 1024,
        description="Maximum size of a WebSocket message; a larger one closes the connection.",
    )
    max_chat_requests: int = Field(
        default=128,
        ge=1,
        description="Concurrent chat completion requests; one API key may have half of them.",
    )
    max_chat_requests_per_minute: int = Field(
        default=1200,
        ge=1,
        description=(
            "Chat requests per minute for one API key, or for one address where no key is required."
        ),
    )
    max_audio_requests: int = Field(
        default=4,
        ge=1,
        description="Concurrent requests at /v1/audio; further ones are refused with Retry-After.",
    )
    max_file_mb: float = Field(
        default=25.0, gt=0.0, le=1024.0, description="Maximum size of a file to be transcribed."
    )
    max_file_s: float = Field(
        default=1800.0,
        gt=0.0,
        le=36_000.0,
        description="Maximum duration of a file to be transcribed (64 kB of memory per second).",
    )
    max_session_s: float = Field(
        default=3600.0, ge=1.0, description="Maximum duration of a session."
    )
    drain_timeout_s: float = Field(
        default=10.0,
        ge=0.0,
        description="Time that running turns may take to finish when the server stops.",
    )
    idle_timeout_s: float = Field(
        default=600.0,
        ge=1.0,
        description="Time without a client message after which a session ends.",
    )

    # WebRTC
    ice_servers: Names = Field(
        default=(),
        description=(
            "STUN and TURN servers for WebRTC (stun:HOST:PORT, turn:HOST:PORT). Not needed where "
            "callers reach this machine directly."
        ),
    )
    ice_username: str = Field(default="", description="User name for the TURN server.")
    ice_credential: str = Field(default="", repr=False, description="Password for the TURN server.")
    public_address: str | None = Field(
        default=None, description="IPv4 address under which a NAT exposes this machine."
    )
    resume_window_s: float = Field(
        default=20.0,
        ge=0.0,
        le=600.0,
        description="Time that a disconnected WebRTC call is kept for a reconnect.",
    )

    # Latency budget
    turn_timeout_s: float = Field(
        default=30.0,
        ge=1.0,
        le=600.0,
        description="Time after which a response that has not started has failed.",
    )
    budget_ms: int = Field(
        default=1000,
        ge=50,
        le=60_000,
        description=(
            "Latency budget of a turn: end of the caller's speech to the first audible sample."
        ),
    )
    budget_stages_ms: StagesMs = Field(
        default=DEFAULT_STAGES_MS,
        description=(
            "Latency budget of each stage, as asr=150,tts=200; stages that are not named keep "
            "their defaults."
        ),
    )
    budget_policies: Policies = Field(
        default=("short_first_clause",),
        description=(
            "What the server may do when a turn exceeds its budget: short_first_clause, filler, "
            "smaller_model, shorter_answer, partial_context."
        ),
    )
    budget_small_model: str = Field(
        default="",
        description=(
            "Engine for the policy smaller_model: MODEL,name=value,... with the options of "
            "`parley bench gate`."
        ),
    )
    budget_filler: Annotated[str, StringConstraints(max_length=100)] = Field(
        default="Let me see.", description="Phrase spoken by the policy filler."
    )

    # Traces, recordings and metrics
    trace_db: bool = Field(
        default=True,
        description="Keep traces of turns in traces.db in PARLEY_HOME; otherwise in memory.",
    )
    trace_max_days: float = Field(
        default=30.0, gt=0.0, description="Age at which traces are deleted."
    )
    trace_max_mb: float = Field(
        default=256.0,
        ge=1.0,
        description="Size of the trace store beyond which the oldest traces are deleted.",
    )
    trace_ring: int = Field(
        default=1000, ge=1, description="Number of traces kept in memory without PARLEY_TRACE_DB."
    )
    store_transcripts: bool = Field(
        default=False,
        description="Store transcripts and replies with the traces; otherwise only their length.",
    )
    record: bool = Field(
        default=False,
        description=(
            "Record both sides of conversations in `recordings` in PARLEY_HOME. Callers must know."
        ),
    )
    record_max_mb: float = Field(
        default=1024.0,
        ge=1.0,
        description="Size of all recordings beyond which the oldest are deleted.",
    )
    metrics: Annotated[Literal["key", "open", "off"], BeforeValidator(_lower)] = Field(
        default="key", description="Access to /metrics: with the API key, open to all, or off."
    )
    otel_endpoint: str | None = Field(
        default=None, description="OTLP/HTTP URL for traces, as http://collector:4318/v1/traces."
    )
    otel_service_name: Name = Field(
        default="parley", description="Service name in OpenTelemetry traces."
    )

    # Telephony
    phone_twilio_auth_token: str = Field(
        default="",
        repr=False,
        description="Auth token of your Twilio account; it verifies Twilio's signatures.",
    )
    phone_public_url: str | None = Field(
        default=None,
        description="Public https:// URL under which phone providers reach this server.",
    )
    phone_token: str = Field(
        default="",
        repr=False,
        description="Token that media streams of other phone providers must present.",
    )
    phone_greeting: str = Field(
        default="Hello, this is Parley.",
        description="Greeting spoken at the start of a phone call; empty: none.",
    )
    phone_lead_ms: int = Field(
        default=200,
        ge=20,
        le=5000,
        description="Audio sent to a phone provider ahead of its playout time.",
    )
    phone_max_calls_per_account: int = Field(
        default=8, ge=1, description="Concurrent calls of one account of a phone provider."
    )
    phone_hang_up_tool: bool = Field(
        default=False, description="Let the model end phone calls. Small models misuse it."
    )
    audiosocket_host: str = Field(
        default="127.0.0.1",
        description=(
            "Address of the AudioSocket listener. The protocol has no authentication: expose it "
            "to Asterisk only."
        ),
    )
    audiosocket_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="TCP port of the AudioSocket listener for Asterisk; unset: none.",
    )


# The first setting of each section of docs/configuration.md, in the order of the class.
SECTIONS = {
    "home": "Files",
    "host": "Network and access",
    "log_level": "Logging",
    "llm_model": "Models",
    "llm_sha256": "Canary roll-out",
    "llm_threads": "Engine",
    "asr_threads": "Speech workers",
    "instructions": "Replies",
    "turn_detection": "Tools and turn taking",
    "max_sessions": "Limits",
    "ice_servers": "WebRTC",
    "turn_timeout_s": "Latency budget",
    "trace_db": "Traces, recordings and metrics",
    "phone_twilio_auth_token": "Telephony",
}


def load_settings(**overrides: object) -> Settings:
    """Settings from the environment, ``overrides`` on top. Raises ConfigError naming the field."""
    try:
        return Settings(**{k: v for k, v in overrides.items() if v is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        details = "; ".join(_told(one) for one in error.errors())
        raise ConfigError(f"invalid settings: {details}") from error


def _told(details: ErrorDetails) -> str:
    """One error, with the variable's name and what it was set to."""
    # Without the numbers of list items: there is no such variable.
    name = _PREFIX + str(details["loc"][0]).upper()
    value, message = details["input"], details["msg"].removeprefix("Value error, ")
    is_shown = isinstance(value, str | int | float) and not any(word in name for word in _SECRET)
    return f"{name}: {message}{f', not {value!r}' if is_shown else ''}"[:_MAX_TOLD_CHARS]


def unknown_variables(environment: Mapping[str, str], settings: Settings) -> list[str]:
    """What looks like a setting and is none, a sentence each: a slip may have cost a guard."""
    known = {name.upper() for name in Settings.model_fields}
    # Clients read this one. Who starts a server with it and without the other has mixed them up.
    others = {"API_KEY"} if settings.api_keys else set()
    given = {name.removeprefix(_PREFIX) for name in environment if name.startswith(_PREFIX)}
    told = []
    for name in sorted(given - known - others):
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {_PREFIX}{close[0]}?" if close else ""
        told.append(f"{_PREFIX}{name} is not a setting of the server and is ignored{hint}")
    return told
