"""One caller's conversation: who has the floor, what was said, what is being answered."""

from app.conversation.eager_admission import EagerAdmission
from app.conversation.events import (
    DtmfReceived,
    Item,
    OutputAudio,
    OutputDone,
    Part,
    PlaybackCut,
    ResponseDone,
    ResponseStarted,
    SessionEvent,
    Sink,
    SpeechStarted,
    ToolCall,
    ToolOutput,
    TranscriptionCompleted,
)
from app.conversation.ids import new_id
from app.conversation.response.out_of_band import OutOfBandResponses
from app.conversation.response.spec import ResponseRequest
from app.conversation.response.tool_constraints import prepare_guides
from app.conversation.services import Services
from app.conversation.session import Session
from app.conversation.session_config import (
    DetectionKind,
    Eagerness,
    NoiseReduction,
    SessionConfig,
    Tool,
    ToolChoice,
    TurnDetection,
)
from app.conversation.speech.asr_scheduler import AsrScheduler, BusyRecognizerError
from app.conversation.speech.batch_synthesis import synthesize_text
from app.conversation.speech.batch_transcription import TranscribedPiece, transcribe_recording
from app.conversation.speech.filler import Filler
from app.conversation.speech.tts_scheduler import TtsScheduler
from app.conversation.tasks import Tasks
from app.conversation.tools import ToolBox, ToolContext, tool
from app.conversation.warm_up import warm_up

__all__ = [
    "prepare_guides",
    "BusyRecognizerError",
    "ToolContext",
    "DetectionKind",
    "TranscribedPiece",
    "DtmfReceived",
    "Eagerness",
    "Filler",
    "Item",
    "EagerAdmission",
    "NoiseReduction",
    "OutputAudio",
    "OutputDone",
    "Part",
    "PlaybackCut",
    "AsrScheduler",
    "ResponseDone",
    "ResponseRequest",
    "ResponseStarted",
    "Services",
    "Session",
    "SessionConfig",
    "SessionEvent",
    "OutOfBandResponses",
    "Sink",
    "TtsScheduler",
    "SpeechStarted",
    "Tasks",
    "Tool",
    "ToolBox",
    "ToolCall",
    "ToolChoice",
    "ToolOutput",
    "TranscriptionCompleted",
    "TurnDetection",
    "transcribe_recording",
    "new_id",
    "synthesize_text",
    "tool",
    "warm_up",
]
