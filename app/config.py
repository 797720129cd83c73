"""Settings, validated at start. Each field is set by the environment variable ``PARLEY_<NAME>``.

An operator reads this file to learn what can be changed; defaults suit two CPU cores and the
embedded models.
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

    home: Path = Field(
        default_factory=lambda: Path.home() / ".parley", description="models and data live here"
    )
    native_dir: Path | None = Field(
        default=None, description="for compiled code, of this user alone; unset: HOME/native"
    )
    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535, description="0 lets the system choose")
    tls_cert: Path | None = Field(default=None, description="certificate chain (PEM)")
    tls_key: Path | None = Field(default=None, description="its private key (PEM)")
    api_keys: Names = Field(default=(), repr=False, description="empty: no key is asked for")
    allowed_origins: Names = Field(
        default=(), description="browser origins besides our own; '*' allows any"
    )
    allowed_hosts: Names = Field(
        default=(),
        description="names under which clients reach this server, besides localhost, addresses "
        "and PARLEY_HOST; '*' allows any",
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)] = (
        "info"
    )
    log_format: Annotated[Literal["text", "json"], BeforeValidator(_lower)] = Field(
        default="text", description="json: one object a line, for log collectors"
    )
    log_transcripts: bool = Field(default=False, description="write what callers say to the log")

    llm_model: str = "package:smollm2-135m-instruct"
    asr_model: str = "package:whisper-tiny.en"
    asr_language: str = Field(
        default="",
        description="that callers speak, as es or en-US, in sessions that name none; empty: a "
        "multilingual recogniser decides",
    )
    tts_model: str = "package:piper-en_US-joe-medium"
    turn_model: str = Field(
        default="",
        description="also judges by the sound whether a turn is over: a smart-turn v3 (ONNX), as "
        "package:smart-turn-v3.2; empty: none",
    )

    llm_sha256: str = Field(
        default="", description="the model must have this content, or the server does not start"
    )
    canary: str = Field(
        default="",
        description="a second engine to roll out: MODEL,name=value,... (app/engine_options.py)",
    )
    canary_share: float = Field(
        default=0.1, ge=0.0, le=0.9, description="of the conversations, those of the second engine"
    )
    canary_sha256: str = Field(default="", description="as llm_sha256, of the second engine")
    canary_patience_ms: int = Field(
        default=1500, ge=50, le=60_000, description="after so long without a sign it is not asked"
    )

    llm_threads: int = Field(
        default_factory=lambda: min(2, os.cpu_count() or 1),
        ge=1,
        le=256,
        description="of the engine; those of the compiled decoder sleep between steps",
    )
    llm_max_sequences: int = Field(default=8, ge=1, le=1024)
    llm_max_context: int | None = Field(default=4096, ge=64)
    llm_policy: Annotated[Literal["deadline", "fcfs", "priority"], BeforeValidator(_lower)] = Field(
        default="deadline", description="who is served first; by deadline suits callers"
    )
    llm_backend: Annotated[
        Literal["auto", "triton", "native", "torch"], BeforeValidator(_lower)
    ] = Field(default="auto", description="a GPU where there is one, compiled code, or torch")
    llm_tensor_parallel: int = Field(
        default=1, ge=1, le=16, description="GPUs of this machine that share the model"
    )
    llm_overlap_steps: bool = Field(
        default=True, description="on a GPU: plan and launch the next step while one runs"
    )
    llm_overlap_rows: int = Field(
        default=512,
        ge=0,
        description="several GPUs: steps of so many rows overlap sums with computing; 0: none do",
    )
    llm_torch_compile: bool = Field(
        default=False, description="on a GPU: compile what a step leaves to torch"
    )
    llm_kv_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "int8", "fp8"], BeforeValidator(_lower)
    ] = Field(
        default="auto",
        description="how keys and values are kept: exact, half, a quarter (fp8: GPUs); auto: "
        "bfloat16 on GPUs and in compiled code, else float32",
    )
    llm_max_step_ms: int = Field(
        default=150, ge=10, le=10_000, description="how long reading a prompt may hold up answers"
    )
    llm_attention_window: int | None = Field(
        default=None,
        ge=16,
        description="tokens see the last so many and the first llm_attention_sinks; unset: all",
    )
    llm_attention_sinks: int = Field(
        default=64, ge=0, description="of a sequence, those that are seen for good"
    )
    llm_standby: bool = Field(
        default=True,
        description="keep a second engine process, without a model, for when the first one dies",
    )
    llm_speculation: str = Field(
        default="auto",
        min_length=1,
        description="who drafts: auto (the head that comes with the model, where it runs in "
        "compiled code on a CPU), off, ngram, or the path of a draft head or of a smaller model",
    )
    llm_speculation_optional: bool = Field(
        default=False, description="start without speculation when the head does not fit"
    )
    llm_draft_tokens: int = Field(default=16, ge=1, le=60, description="drafts in a step, at most")
    llm_draft_depth: int = Field(default=5, ge=1, le=16, description="one after another, at most")
    llm_draft_width: int = Field(
        default=4, ge=1, le=8, description="paths followed where rows are nearly free; 1: a chain"
    )
    asr_threads: int = Field(default=1, ge=1, le=64)
    tts_threads: int = Field(default=1, ge=1, le=64)
    speech_workers: int = Field(default=2, ge=1, le=64, description="threads for ASR and TTS jobs")

    instructions: str = DEFAULT_INSTRUCTIONS
    temperature: float = Field(default=0.2, ge=0.0, le=2.0)
    top_p: float = Field(default=0.9, gt=0.0, le=1.0)
    repetition_penalty: float = Field(
        default=1.05, ge=1.0, le=2.0, description="small models repeat themselves without it"
    )
    max_reply_tokens: int = Field(default=160, ge=1, le=4096)

    summarise_forgotten: bool = Field(
        default=False,
        description="the model sums up what its context has no more room for; not for small models",
    )

    turn_detection: TurnDetectionKind = Field(
        default="semantic_vad",
        description="how turns end in sessions that do not say it: by what was said, or by silence",
    )
    tools: str | None = Field(
        default=None, description="module with Python tools for the model: 'module' or 'module:a,b'"
    )
    tool_filler: str = Field(
        default="One moment.", description="said while a tool takes long; empty: nothing"
    )
    tool_filler_ms: int = Field(default=800, ge=0, le=60_000)
    max_tool_rounds: int = Field(
        default=4, ge=1, le=32, description="how often one answer may call the server's own tools"
    )

    vad_threshold: float = Field(default=0.5, gt=0.0, lt=1.0)
    vad_prefix_padding_ms: int = Field(default=300, ge=0, le=5000)
    vad_silence_ms: int = Field(default=500, ge=100, le=10_000)
    eager_silence_ms: int = Field(
        default=32, ge=30, le=10_000, description="silence after which a transcript is tried"
    )
    eager_reply: bool = Field(
        default=True, description="begin the answer before the end of the turn is certain"
    )
    eager_max_generating: int = Field(
        default=2, ge=1, description="with so many answers in the making none is begun in hope"
    )
    partial_transcripts: bool = Field(
        default=True, description="transcribe while the caller speaks, when there is time"
    )
    max_turn_s: float = Field(default=60.0, ge=1.0, le=600.0)
    playout_lead_ms: int = Field(
        default=1000, ge=60, le=60_000, description="audio sent ahead of its playout time"
    )

    max_sessions: int = Field(default=16, ge=1)
    max_sessions_per_minute: int = Field(
        default=240, ge=1, description="new sessions of one key, or of one address without keys"
    )
    max_messages_per_s: int = Field(
        default=1000,
        ge=50,
        description="of one key, 16 KiB counted as one; more is read later",
    )
    max_message_bytes: int = Field(
        default=16 * 1024 * 1024,
        ge=64 * 1024,
        description="a larger message closes the connection; the API allows 15 MiB of audio",
    )
    max_audio_requests: int = Field(
        default=4, ge=1, description="files and texts at once at /v1/audio; more come again"
    )
    max_file_mb: float = Field(
        default=25.0, gt=0.0, le=1024.0, description="of a file to be transcribed"
    )
    max_file_s: float = Field(
        default=1800.0, gt=0.0, le=36_000.0, description="and how long it may last: 64 kB a second"
    )
    max_session_s: float = Field(default=3600.0, ge=1.0, description="a session ends after so long")
    drain_timeout_s: float = Field(
        default=10.0, ge=0.0, description="how long turns may run on when the server is stopped"
    )
    idle_timeout_s: float = Field(default=600.0, ge=1.0, description="without a client message")
    ice_servers: Names = Field(
        default=(),
        description="stun:HOST:PORT and turn:HOST:PORT for WebRTC; none is needed where callers "
        "reach this machine directly",
    )
    ice_username: str = Field(default="", description="of the TURN server")
    ice_credential: str = Field(default="", repr=False, description="of the TURN server")
    public_address: str | None = Field(
        default=None, description="the IPv4 address under which a NAT shows this machine to callers"
    )
    resume_window_s: float = Field(
        default=20.0, ge=0.0, le=600.0, description="how long a lost WebRTC call waits to go on"
    )
    turn_timeout_s: float = Field(
        default=30.0,
        ge=1.0,
        le=600.0,
        description="an answer not begun by then has failed",
    )

    budget_ms: int = Field(
        default=1000, ge=50, le=60_000, description="end of the voice to the first audible sample"
    )
    budget_stages_ms: StagesMs = Field(
        default=DEFAULT_STAGES_MS, description="asr=150,tts=200: of it, for each stage"
    )
    budget_policies: Policies = Field(
        default=("short_first_clause",),
        description="what is done when a turn is late: short_first_clause, filler, "
        "smaller_model, shorter_answer, partial_context",
    )
    budget_small_model: str = Field(
        default="",
        description="what the policy smaller_model asks: MODEL,name=value,... "
        "(app/engine_options.py)",
    )
    budget_filler: Annotated[str, StringConstraints(max_length=100)] = Field(
        default="Let me see.", description="what the policy filler says"
    )

    trace_db: bool = Field(
        default=True, description="keep the traces of turns in HOME/traces.db; else in memory"
    )
    trace_max_days: float = Field(default=30.0, gt=0.0, description="older turns are deleted")
    trace_max_mb: float = Field(default=256.0, ge=1.0, description="the oldest are deleted beyond")
    trace_ring: int = Field(default=1000, ge=1, description="turns kept without trace_db")
    store_transcripts: bool = Field(
        default=False,
        description="keep what was said with the traces; else only how many characters it had",
    )
    record: bool = Field(
        default=False,
        description="keep the sound of both sides in HOME/recordings; your callers must know",
    )
    record_max_mb: float = Field(default=1024.0, ge=1.0, description="the oldest go beyond")
    metrics: Annotated[Literal["key", "open", "off"], BeforeValidator(_lower)] = Field(
        default="key", description="/metrics: behind the API key, open to all, or not there"
    )
    otel_endpoint: str | None = Field(
        default=None, description="OTLP/HTTP traces URL, as in http://collector:4318/v1/traces"
    )
    otel_service_name: Name = "parley"

    phone_twilio_auth_token: str = Field(
        default="", repr=False, description="of your Twilio account: its signatures are checked"
    )
    phone_public_url: str | None = Field(
        default=None,
        description="https://HOST under which phone providers reach this server, behind a proxy",
    )
    phone_token: str = Field(
        default="", repr=False, description="what other providers' streams have to bring along"
    )
    phone_greeting: str = Field(
        default="Hello, this is Parley.", description="said when a call begins; empty: nothing"
    )
    phone_lead_ms: int = Field(
        default=200, ge=20, le=5000, description="audio sent to a provider ahead of its playout"
    )
    phone_max_calls_per_account: int = Field(
        default=8, ge=1, description="calls at once from one account of a provider"
    )
    phone_hang_up_tool: bool = Field(
        default=False, description="let the model end phone calls; small models misuse it"
    )
    audiosocket_host: str = Field(
        default="127.0.0.1", description="AudioSocket knows no keys: only for Asterisk to reach"
    )
    audiosocket_port: int | None = Field(
        default=None, ge=0, le=65535, description="of Asterisk's AudioSocket (TCP); unset: none"
    )


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
