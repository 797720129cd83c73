"""Finished turns without a conversation, for what stores, counts and shows them."""

from __future__ import annotations

from typing import Any

from app.observe.store import Turn
from app.observe.trace import PATH_INSTANTS


def a_turn(number: int = 1, **changes: Any) -> Turn:
    """A record like that of a spoken turn which was answered; 600 ms voice to voice."""
    stages = {
        "endpoint": 310.0,
        "asr": 95.0,
        "queue": 2.0,
        "prefill": 38.0,
        "decode": 84.0,
        "tts": 66.0,
        "send": 5.0,
    }
    ends = dict(zip(PATH_INSTANTS[1:3], (310.0, 405.0), strict=True))
    ends |= {"llm_submit": 405.5, "llm_scheduled": 407.0, "llm_first_token": 445.0}
    ends |= {"first_clause": 529.0, "tts_first_audio": 595.0, "first_audio_sent": 600.0}
    return {
        "turn_id": f"turn_{number}",
        "session_id": f"sess_{number // 10}",
        "response_id": f"resp_{number}",
        "spoken": True,
        "outcome": "answered",
        "reason": "",
        "ended_at_ms": 1_796_000_000_000 + 1000 * number,
        "transcript": "How are you?",
        "reply": "Fine.",
        "voice_to_voice_ms": 600.0,
        "time_to_first_audio_ms": 290.0,
        "stages_ms": stages,
        "instants_ms": {"speech_end": 0.0, **ends, "ended": 2600.0},
        "facts": {
            "asr_ms": 80.0,
            "asr_audio_s": 1.5,
            "queue_wait_ms": 1.0,
            "prompt_tokens": 60,
            "cached_tokens": 40,
            "computed_tokens": 20,
            "completion_tokens": 12,
            "llm_steps": 12,
            "ttft_ms": 39.5,
            "tpot_ms": 8.0,
            "finish_reason": "stop",
            "tts_ms": 120.0,
            "tts_first_ms": 60.0,
            "tts_clauses": 2,
            "reply_audio_s": 2.0,
            "playout_gap_ms": 0.0,
            "wasted_transcripts": 1,
            "wasted_answers": 1,
            "wasted_tokens": 5,
        },
        **changes,
    }
