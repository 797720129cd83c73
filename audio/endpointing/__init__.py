"""When a speaker has finished: VAD endpointer, semantic endpointing, backchannels."""

from audio.endpointing.backchannel import means_to_stop
from audio.endpointing.prosody import Prosody, measure_end
from audio.endpointing.semantic import WAITS
from audio.endpointing.smart_turn import TurnModel
from audio.endpointing.speech_offset import find_dip, find_voice_end
from audio.endpointing.vad_endpointer import (
    Endpointer,
    ServerVadConfig,
    VoiceEnded,
    VoiceEvent,
    VoicePaused,
    VoiceResumed,
    VoiceStarted,
    VoiceState,
)

__all__ = [
    "Endpointer",
    "Prosody",
    "ServerVadConfig",
    "TurnModel",
    "VoiceEnded",
    "VoiceEvent",
    "VoicePaused",
    "VoiceResumed",
    "VoiceStarted",
    "VoiceState",
    "WAITS",
    "find_dip",
    "find_voice_end",
    "means_to_stop",
    "measure_end",
]
