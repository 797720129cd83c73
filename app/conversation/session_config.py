"""What a client may set about one conversation, in the conversation's own terms.

``app.api.realtime.connection`` builds a new one for every ``session.update``; the session swaps it
whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from audio.codecs import PCM16_24K, AudioFormat

Modality = Literal["audio", "text"]
DetectionKind = Literal["server_vad", "semantic_vad"]
Eagerness = Literal["low", "medium", "high", "auto"]
NoiseReduction = Literal["near_field", "far_field"]


@dataclass(frozen=True, slots=True)
class TurnDetection:
    """How the end of the caller's turn is found.

    ``kind``: ``server_vad`` waits for ``silence_duration_ms`` of silence; ``semantic_vad`` waits as
    long as what was said suggests, with ``eagerness`` as the client's wish (``threshold`` and
    ``prefix_padding_ms`` are then the server's defaults). ``create_response``: answer at the end of
    a turn. ``interrupt_response``: the caller's voice stops a running answer. ``idle_timeout_ms``:
    silence after an answer has been played until the assistant speaks up by itself; None: never.
    """

    kind: DetectionKind = "server_vad"
    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    eagerness: Eagerness = "auto"
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the client runs for the model. ``parameters``: a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may call a tool, must not, must, or must call the one named ``name``."""

    kind: Literal["auto", "none", "required", "function"] = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Settings of one conversation.

    ``max_output_tokens`` None: the server's default. ``turn_detection`` None: the client commits
    the audio itself. ``speed`` is a factor on the speaking rate. ``transcribe``: send the caller's
    transcript to the client (it is made in any case). ``language`` None: the model decides.
    ``word_timestamps``: say when the words of the transcript were spoken, too.
    ``budget_ms`` None: the server's budget from the end of the voice to the first audible sample.
    ``noise_reduction``: the caller's microphone, as far as the client wants its noise reduced.
    ``tools`` are the client's; ``server_tools``: which of the server's own the model may call, None
    for all. ``parallel_tool_calls``: one reply of the model may hold several calls.
    ``retention_ratio``: the share of a prompt that is kept when it is too long; None: as the server
    likes, 0: nothing is dropped, the response fails.
    """

    instructions: str
    modality: Modality = "audio"
    max_output_tokens: int | None = None
    turn_detection: TurnDetection | None = field(default_factory=TurnDetection)
    noise_reduction: NoiseReduction | None = None
    input_format: AudioFormat = PCM16_24K
    output_format: AudioFormat = PCM16_24K
    speed: float = 1.0
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = False
    server_tools: tuple[str, ...] | None = None
    retention_ratio: float | None = None
    transcribe: bool = True
    language: str | None = None
    transcription_prompt: str | None = None
    send_traces: bool = False
    word_timestamps: bool = False
    budget_ms: int | None = None

    @property
    def listening(self) -> tuple[TurnDetection | None, AudioFormat, NoiseReduction | None]:
        """What the caller's audio is listened to by: a change begins anew."""
        return self.turn_detection, self.input_format, self.noise_reduction

    @property
    def calling(self) -> tuple[tuple[Tool, ...], tuple[str, ...] | None, ToolChoice, bool]:
        """What the model may call, and how."""
        return self.tools, self.server_tools, self.tool_choice, self.parallel_tool_calls

    @property
    def reading(self) -> tuple[str, tuple[Tool, ...], tuple[str, ...] | None]:
        """What the model reads before the conversation."""
        return self.instructions, self.tools, self.server_tools
