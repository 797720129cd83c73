"""How a turn ended, in the words of its trace."""

from __future__ import annotations

from app.conversation.events import Response
from app.errors import TurnTimeoutError
from app.observe.trace import TurnOutcome


def outcome_of(response: Response, reply: str) -> TurnOutcome:
    """``response`` has ended, or is in progress although the call is over; ``reply`` was said."""
    match response.status:
        case "completed":
            return "answered" if reply.strip() else "silent"
        case "incomplete":
            return "incomplete"
        case "failed":
            return "timed_out" if response.reason == TurnTimeoutError.code else "failed"
        case _ if response.is_withdrawn:
            return "withdrawn"
        case _:  # cancelled, or in progress when the call ended
            return "interrupted" if response.reason == "turn_detected" else "cancelled"
