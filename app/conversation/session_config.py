"""What a client may set about one conversation, in the conversation's own terms.

``app.api.realtime`` builds a new one for every ``session.update``; the session swaps it whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from audio.codecs import PCM16_24K, AudioFormat

Modality = Literal["audio", "text"]


@dataclass(frozen=True, slots=True)
class TurnDetection:
    """Server-side voice activity detection.

    ``create_response``: answer at the end of a turn. ``interrupt_response``: the caller's voice
    stops a running answer.
    """

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    create_response: bool = True
    interrupt_response: bool = True


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Settings of one conversation.

    ``max_output_tokens`` None: the server's default. ``turn_detection`` None: the client commits
    the audio itself. ``speed`` is a factor on the speaking rate. ``transcribe``: send the caller's
    transcript to the client (it is made in any case). ``language`` None: the model decides.
    ``budget_ms`` None: the server's budget from the end of the voice to the first audible sample.
    """

    instructions: str
    modality: Modality = "audio"
    max_output_tokens: int | None = None
    turn_detection: TurnDetection | None = field(default_factory=TurnDetection)
    input_format: AudioFormat = PCM16_24K
    output_format: AudioFormat = PCM16_24K
    speed: float = 1.0
    transcribe: bool = True
    language: str | None = None
    transcription_prompt: str | None = None
    send_traces: bool = False
    budget_ms: int | None = None
