"""What all sessions of a server share."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass, field

from app.config import Settings
from app.conversation.filler import Filler
from app.conversation.load import Load
from app.conversation.recognition import Recognition
from app.conversation.tools import ToolBox
from app.observe.loop_lag import LoopLag
from app.observe.metrics import Metrics
from app.observe.writer import TraceWriter
from audio.tts import Synthesizer
from audio.turn_model import TurnModel
from audio.vad import VadModel
from llm_core import EngineClient


@dataclass(frozen=True, slots=True)
class Services:
    """Loaded models and shared resources; ``workers`` runs ASR and TTS jobs.

    ``filler``: what the budget's policy of that name says; None when it is off.
    ``tools``: Python functions that the model may call. ``turn_model``: judges by the sound whether
    a caller has finished; None when the operator has none.
    """

    engine: EngineClient
    recognition: Recognition
    load: Load
    synthesizer: Synthesizer
    vad: VadModel
    workers: Executor
    traces: TraceWriter
    metrics: Metrics
    loop_lag: LoopLag
    settings: Settings
    filler: Filler | None = None
    tools: ToolBox = field(default_factory=ToolBox)
    turn_model: TurnModel | None = None
