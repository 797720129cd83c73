"""End-of-turn detection: VAD state machine, speech offset, semantic endpointing, backchannels."""

from audio.endpointing.backchannel import is_barge_in
from audio.endpointing.prosody import Prosody, measure_prosody
from audio.endpointing.semantic import ENDPOINTING_DELAYS
from audio.endpointing.smart_turn import SmartTurnModel
from audio.endpointing.speech_offset import find_speech_offset, trailing_silence_len
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
    "ENDPOINTING_DELAYS",
    "Endpointer",
    "Prosody",
    "ServerVadConfig",
    "SmartTurnModel",
    "VoiceEnded",
    "VoiceEvent",
    "VoicePaused",
    "VoiceResumed",
    "VoiceStarted",
    "VoiceState",
    "find_speech_offset",
    "is_barge_in",
    "measure_prosody",
    "trailing_silence_len",
]
