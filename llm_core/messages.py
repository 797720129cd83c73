"""What the engine process and its client say to each other, and what users of the client see.

All types are msgspec structs: they are validated when they are decoded, and no pickle is involved.
Instants are ``time.monotonic_ns`` values; that clock is shared by all processes of one machine.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort"]
KvDtype = Literal["float32", "bfloat16", "int8"]


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation, before the chat template is applied."""

    role: Literal["system", "user", "assistant"]
    content: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen, and when to stop.

    ``temperature`` 0 is greedy. ``top_k`` 0 means off. ``seed`` None draws a fresh one.
    Penalties follow OpenAI (frequency, presence: subtracted) and CTRL (repetition: divided).
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one request."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class FirstToken(msgspec.Struct, frozen=True, kw_only=True, tag="first_token"):
    """Comes once, before the first text: where the time to the first token went."""

    received_ns: int
    scheduled_ns: int
    first_token_ns: int
    prompt_tokens: int
    cached_tokens: int


class TextDelta(msgspec.Struct, frozen=True, kw_only=True, tag="text"):
    """More text. Never half a character, never the beginning of a stop string.

    ``num_tokens`` is the number of tokens generated so far.
    """

    text: str
    num_tokens: int


class GenerationDone(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The last event of a generation."""

    finish_reason: FinishReason
    usage: Usage
    num_steps: int
    finished_ns: int


GenerationEvent = FirstToken | TextDelta | GenerationDone


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine has loaded."""

    name: str
    context_len: int
    vocab_size: int
    num_layers: int
    weight_format: str
    num_threads: int


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot; all zero running and waiting means that nothing is leaked."""

    num_running: int
    num_waiting: int
    num_free_slots: int
    num_slots: int
    cached_tokens: int


class PrefillResult(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a prefill-only request."""

    prompt_tokens: int
    cached_tokens: int


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How to start an engine process.

    ``max_sequences`` requests run at once, each in a KV slot of ``max_context`` tokens (None: the
    model's own limit); ``max_waiting`` more may wait. Raises ValueError for impossible numbers.
    """

    model_path: str
    num_threads: int = 1
    max_sequences: int = 8
    max_context: int | None = None
    max_waiting: int = 64

    def __post_init__(self) -> None:
        for name in ("num_threads", "max_sequences", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_context is not None and self.max_context < 2:
            raise ValueError(f"max_context must be at least 2, got {self.max_context}")
