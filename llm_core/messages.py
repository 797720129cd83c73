"""What the engine process and its client say to each other, and what users of the client see.

All types are msgspec structs: they are validated when they are decoded, and no pickle is involved.
Instants are ``time.monotonic_ns`` values; that clock is shared by all processes of one machine.
"""

from __future__ import annotations

from typing import Literal, TypedDict

import msgspec

FinishReason = Literal["stop", "length", "abort"]
KvChoice = Literal["auto", "float32", "bfloat16", "int8", "fp8"]
ModelBackend = Literal["auto", "native", "torch", "triton"]
Overflow = Literal["refuse", "drop_oldest"]
Downgrade = Literal["partial_context", "shorter_answer"]
DraftControl = Literal["auto", "fixed"]
LogFormat = Literal["text", "json"]
PolicyName = Literal["deadline", "fcfs", "priority"]

# How a model writes its calls of tools: see tool_calls.py.
ToolFormat = Literal["hermes", "llama3"]


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call. ``parameters`` is a JSON Schema, as JSON text;
    ``strict`` as in ``JsonGuide``."""

    name: str
    description: str = ""
    parameters: str = '{"type": "object", "properties": {}}'
    strict: bool = False


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the model made. ``arguments`` is JSON text, of an object."""

    call_id: str
    name: str
    arguments: str


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation, before the chat template is applied.

    ``tool_calls`` are the assistant's; ``call_id`` is that of the call which a ``tool`` message
    answers. ``tools`` offers functions to the model; it stands on the first message (an empty
    system message will do), so that the messages alone say what the prompt is.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    tools: tuple[ToolSpec, ...] = ()


class JsonGuide(msgspec.Struct, frozen=True, kw_only=True, tag="json"):
    """The reply is one JSON value of this schema (JSON text); "" asks for any JSON object.

    ``strict``: a schema with keywords that cannot be enforced is refused; otherwise they are
    ignored.
    """

    schema: str = ""
    strict: bool = True


class RegexGuide(msgspec.Struct, frozen=True, kw_only=True, tag="regex"):
    """All of the reply matches ``pattern`` (the syntax of Rust's regex crate; no look-around)."""

    pattern: str


class ChoiceGuide(msgspec.Struct, frozen=True, kw_only=True, tag="choice"):
    """The reply is one of ``options``."""

    options: tuple[str, ...]


class ToolGuide(msgspec.Struct, frozen=True, kw_only=True, tag="tools"):
    """Calls in the reply are well-formed: known names, arguments of the tool's own schema.

    ``required``: the reply is a call (with ``parallel``: one or more) and nothing else. Otherwise
    the model is free to write text, until it begins a call; with ``text``, a reply without calls
    is JSON of that guide.
    """

    tools: tuple[ToolSpec, ...]
    required: bool = False
    parallel: bool = True
    text: JsonGuide | None = None


Guide = JsonGuide | RegexGuide | ChoiceGuide | ToolGuide


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen, and when to stop.

    ``temperature`` 0 is greedy. ``top_k`` 0 means off. ``seed`` None draws a fresh one.
    Penalties follow OpenAI (frequency, presence: subtracted) and CTRL (repetition: divided).
    ``logit_bias`` is added to the logits of the token ids named. Before ``min_tokens`` tokens the
    reply ends neither by itself nor at a stop string. ``logprobs`` None is off; a number asks for
    log-probabilities, and for as many alternatives a token. ``guide`` restricts what may be said.
    ``continue_last``: what comes continues the last message, which the prompt leaves open.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    guide: Guide | None = None
    continue_last: bool = False


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a request is served, apart from what it says.

    ``deadline_ns`` (``time.monotonic_ns``): when the first token, later the next one, is needed;
    ``priority``: higher is served first; ``cache_salt``: only requests with the same one share
    cached prefixes; ``timeout_ms``: the request fails with RequestTimeoutError if it is not done
    after that; ``overflow``: what happens to a conversation longer than the context: it is refused,
    or its oldest turns are left out (the answer says how many messages) until about
    ``retention_ratio`` of the room for a prompt is taken, so that the next turns have room too.
    ``spare_tokens`` more than the reply's must be free besides (of a quarter of the context at
    most): with it a prefill makes room for what will be said next.
    ``downgrades`` allows the engine, when the deadline is at risk, to answer from the last turn
    alone, or shortly; FirstToken says which it did.
    """

    deadline_ns: int | None = None
    priority: int = 0
    cache_salt: str = ""
    timeout_ms: int | None = None
    overflow: Overflow = "refuse"
    retention_ratio: float = 0.75
    spare_tokens: int = 0
    downgrades: tuple[Downgrade, ...] = ()


class OptionFields(TypedDict, total=False):
    """The fields of ``RequestOptions``, as keyword arguments."""

    deadline_ns: int | None
    priority: int
    cache_salt: str
    timeout_ms: int | None
    overflow: Overflow
    retention_ratio: float
    spare_tokens: int
    downgrades: tuple[Downgrade, ...]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one request. ``unseen_tokens``: of prompt and completion, those that the last
    token was chosen without, for a sliding window had left them (``attention_window``)."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    unseen_tokens: int = 0


class FirstToken(msgspec.Struct, frozen=True, kw_only=True, tag="first_token"):
    """Comes once, before the first text: where the time to the first token went."""

    received_ns: int
    scheduled_ns: int
    first_token_ns: int
    prompt_tokens: int
    cached_tokens: int
    dropped_messages: int = 0
    downgrades: tuple[Downgrade, ...] = ()
    unseen_tokens: int = 0


class Alternative(msgspec.Struct, frozen=True):
    """A token's bytes and the natural logarithm of its probability."""

    token: bytes
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token of the reply, and the likeliest at its place (the best first).

    Of the model's own distribution: before temperature, penalties, biases and guides.
    """

    token: bytes
    logprob: float
    top: tuple[Alternative, ...] = ()


class TextDelta(msgspec.Struct, frozen=True, kw_only=True, tag="text"):
    """More text. Never half a character, never the beginning of a stop string.

    ``num_tokens`` is the number of tokens generated so far. ``logprobs``, when asked for, are of
    the tokens whose text begins in this delta: over a whole reply, of every token that has a part
    in its text, and of no other.
    """

    text: str
    num_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """What drafts did. ``num_steps`` of a sequence verified ``num_drafted`` drafts, of which
    ``num_accepted`` were right; the first entry by depth counts drafts that follow known text.
    ``draft_ns`` was spent on drafting, ``verify_ns`` on the steps that verified."""

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_by_depth: tuple[int, ...] = ()
    draft_ns: int = 0
    verify_ns: int = 0


class GenerationDone(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The last event of a generation."""

    finish_reason: FinishReason
    usage: Usage
    num_steps: int
    finished_ns: int
    speculation: Speculation = Speculation()


GenerationEvent = FirstToken | TextDelta | GenerationDone


class GuideReady(msgspec.Struct, frozen=True, kw_only=True, tag="guide_ready"):
    """A guide can be followed, and replies that have it begin without a delay. ``num_bytes``:
    what it takes of the engine's memory, about."""

    num_bytes: int


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine has loaded. ``content_hash``: see ``model_hash``."""

    name: str
    context_len: int
    vocab_size: int
    num_layers: int
    weight_format: str
    num_threads: int
    tool_format: ToolFormat = "hermes"
    content_hash: str = ""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot, and sums since the start.

    Nothing is leaked when nothing runs or waits, no draft is open, and free and pinned blocks are
    all there are (blocks that only the prefix cache holds count as free).
    """

    num_running: int
    num_waiting: int
    num_drafts: int
    num_blocks: int
    num_free_blocks: int
    num_pinned_blocks: int
    cached_tokens: int
    total_prompt_tokens: int = 0
    total_hit_tokens: int = 0
    total_evicted_blocks: int = 0
    total_preempted: int = 0
    total_timeouts: int = 0
    total_downgraded: int = 0
    speculation: Speculation = Speculation()


class PrefillResult(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a prefill-only request, or of one revision of a draft."""

    prompt_tokens: int
    cached_tokens: int
    dropped_messages: int = 0
    revision: int = 0


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How to start an engine process.

    ``max_sequences`` requests run at once, each of ``max_context`` tokens at most (None: the
    model's own limit); ``max_waiting`` more may wait. ``kv_cache_tokens`` is the size of the KV
    pool that they and the prefix cache share (None: 2,048 for each of ``max_sequences``, or one
    whole context if that is more). ``kv_dtype`` is how keys and values are kept; "auto" is bfloat16
    on a GPU and in the compiled decoder, float32 elsewhere. ``policy`` says who is served first.
    ``max_step_ms`` is how long a prompt's chunk may keep the streams waiting; the number of rows
    that this allows is learnt from the steps. ``standby`` keeps a second
    process that has loaded its code (160 MB) and needs only the model when the first one
    dies. An engine that gives no sign of life for ``hang_timeout_s``, or is as long at one thing
    that should take milliseconds, is killed and started again (0: never). ``backend`` "triton" is
    kernels on a GPU, "native" compiled C, "torch" torch's operations, "auto" the fastest one that
    can run here; ``native_cache_dir`` is where the compiled library is kept (None: the user's cache
    directory). ``tensor_parallel`` is how many GPUs of this machine share one model, each with a
    process of its own; steps of ``overlap_rows`` rows and more (0: none) are computed in two
    halves, so that their sums over the GPUs overlap with computing. ``overlap_steps``: on a GPU the
    next step is planned and launched while one runs; the tokens are then known one step later.
    ``torch_compile``: what a GPU step leaves to torch is compiled.

    ``speculation`` says who drafts: "off" nobody; "auto" the draft head that comes with this
    package for the model, if there is one, and the model runs in compiled code on a CPU without an
    attention window, else nobody; "ngram" what stood in the text before; else the path of a head or
    of a smaller model with the same tokens. What a grammar forces is drafted where anything may be.
    ``speculation_optional``: where the head does not fit, go on without one. At most
    ``draft_tokens`` drafts of ``draft_depth`` one after another, of which ``draft_width`` paths are
    followed; ``draft_control`` "auto" drafts less, or not at all, where that is measured to be
    faster, "fixed" always does.

    ``attention_window``: tokens see only the last so many before them and the first
    ``attention_sinks`` of their sequence (both rounded up to blocks of 16), at the positions that
    they have in the text; blocks between are given back, so that a long conversation needs no more
    of the pool than that. None: all. Not together with drafts, nor on a GPU.

    ``log_format`` is the form of the lines that the engine and its ranks write to standard error.
    Raises ValueError for impossible numbers.
    """

    model_path: str
    num_threads: int = 1
    max_sequences: int = 8
    max_context: int | None = None
    max_waiting: int = 64
    kv_cache_tokens: int | None = None
    kv_dtype: KvChoice = "auto"
    policy: PolicyName = "deadline"
    max_step_ms: int = 150
    standby: bool = False
    hang_timeout_s: float = 10.0
    backend: ModelBackend = "auto"
    native_cache_dir: str | None = None
    speculation: str = "off"
    speculation_optional: bool = False
    draft_tokens: int = 16
    draft_depth: int = 5
    draft_width: int = 4
    draft_control: DraftControl = "auto"
    tensor_parallel: int = 1
    attention_window: int | None = None
    attention_sinks: int = 64
    overlap_rows: int = 512
    overlap_steps: bool = True
    torch_compile: bool = False
    log_format: LogFormat = "text"

    def __post_init__(self) -> None:
        for name in (
            *("num_threads", "max_sequences", "max_waiting", "max_step_ms", "tensor_parallel"),
            *("draft_tokens", "draft_depth", "draft_width"),
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.hang_timeout_s != 0 and self.hang_timeout_s < 1:
            raise ValueError(f"hang_timeout_s must be 0 or at least 1, got {self.hang_timeout_s}")
        if self.attention_sinks < 0:
            raise ValueError(f"attention_sinks must be at least 0, got {self.attention_sinks}")
        if self.attention_window is not None:
            recent = self.attention_window
            if recent < 16:
                raise ValueError(f"attention_window must be at least 16, got {recent}")
            if self.speculation not in ("off", "auto"):
                raise ValueError("attention_window needs speculation to be off or auto")
        if self.overlap_rows < 0:
            raise ValueError(f"overlap_rows must be at least 0, got {self.overlap_rows}")
        if self.max_context is not None and self.max_context < 2:
            raise ValueError(f"max_context must be at least 2, got {self.max_context}")
        if self.kv_cache_tokens is not None and self.kv_cache_tokens < 64:
            raise ValueError(f"kv_cache_tokens must be at least 64, got {self.kv_cache_tokens}")
