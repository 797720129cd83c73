"""What all sessions of a server share."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

from app.config import Settings
from app.conversation.eager_admission import EagerAdmission
from app.conversation.speech.asr_scheduler import AsrScheduler
from app.conversation.speech.filler import Filler
from app.conversation.speech.tts_scheduler import TtsScheduler
from app.conversation.tools import ToolBox
from app.observe import LoopLag, Metrics, TraceWriter
from app.routing import LlmEngine, Rollout
from audio.endpointing import SmartTurnModel
from audio.tts import Synthesizer
from audio.vad import VadModel


@dataclass(frozen=True, slots=True)
class Services:
    """Loaded models and shared resources; ``workers`` runs ASR and TTS jobs,
    which ``recognition`` and ``speaking`` put in order.

    ``filler``: what the budget's policy of that name says; None when it is off.
    ``tools``: Python functions that the model may call. ``rollout``: of a second engine.
    ``small_engine``: for answers that would be late, when the policy ``smaller_model`` is on.
    ``turn_model``: judges by the sound whether a caller has finished; None when the operator wants
    none.
    """

    engine: LlmEngine
    recognition: AsrScheduler
    load: EagerAdmission
    speaking: TtsScheduler
    synthesizer: Synthesizer
    vad: VadModel
    workers: Executor
    traces: TraceWriter
    metrics: Metrics
    loop_lag: LoopLag
    settings: Settings
    filler: Filler | None = None
    tools: ToolBox = field(default_factory=ToolBox)
    turn_model: SmartTurnModel | None = None
    rollout: Rollout | None = None
    small_engine: LlmEngine | None = None

    def for_conversation(self, conversation_id: str) -> Services:
        """The same with the engine that this conversation is given to."""
        if self.rollout is None:
            return self
        return replace(self, engine=self.rollout.engine_for(conversation_id))
