"""Clients of a server: talk client, phone provider simulator, recordings of both sides."""

from app.clients.call import AudioSocketPort, CallClient, Trouble, open_call
from app.clients.recording import RATE, write_mono
from app.clients.server_process import OwnServer, own_server
from app.clients.talk import (
    INVALID_KEY,
    CallerAudio,
    NoSpeechError,
    TalkError,
    TalkResult,
    is_valid_key,
    load_caller_audio,
    open_talk,
)
from app.clients.talk_log import LoggedTurn, TalkLog

__all__ = [
    "AudioSocketPort",
    "CallClient",
    "CallerAudio",
    "INVALID_KEY",
    "NoSpeechError",
    "OwnServer",
    "RATE",
    "TalkError",
    "TalkLog",
    "TalkResult",
    "Trouble",
    "LoggedTurn",
    "is_valid_key",
    "load_caller_audio",
    "open_call",
    "open_talk",
    "own_server",
    "write_mono",
]
