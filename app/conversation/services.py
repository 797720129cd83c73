"""What all sessions of a server share."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass, field

from app.config import Settings
from app.conversation.load import Load
from app.conversation.recognition import Recognition
from app.conversation.tools import ToolBox
from app.observe.loop_lag import LoopLag
from app.observe.trace import TraceStore
from audio.tts import Synthesizer
from audio.vad import VadModel
from llm_core import EngineClient


@dataclass(frozen=True, slots=True)
class Services:
    """Loaded models and shared resources; ``workers`` runs ASR and TTS jobs.

    ``tools``: Python functions that the model may call.
    """

    engine: EngineClient
    recognition: Recognition
    load: Load
    synthesizer: Synthesizer
    vad: VadModel
    workers: Executor
    traces: TraceStore
    loop_lag: LoopLag
    settings: Settings
    tools: ToolBox = field(default_factory=ToolBox)
