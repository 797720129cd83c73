"""When nobody says anything for so long that the assistant should speak up."""

from __future__ import annotations

from app.conversation.session_config import TurnDetection

# A caller who has left is not talked to for ever.
_MAX_IN_A_ROW = 3

PROMPT = (
    "The user has been silent for a while. Ask in one short sentence whether they are still there."
)


class IdleTimeout:
    """Looked at now and then: ``is_due`` is True once for each silence that lasts too long.

    The silence begins when the last answer has been heard, nobody speaks and nothing is under way
    (no transcript, no answer, no tool); without an answer before it there is none.
    """

    def __init__(self) -> None:
        self.since_ns = 0
        """Since when it has been quiet, when ``is_due`` last said True."""
        self._quiet_since_ns: int | None = None
        self._num_in_a_row = 0

    def caller_spoke(self) -> None:
        """The caller is there."""
        self._quiet_since_ns = None
        self._num_in_a_row = 0

    def is_due(self, detection: TurnDetection | None, now_ns: int, *, is_quiet: bool) -> bool:
        """Whether the silence has just become too long for ``detection``."""
        timeout_ms = detection.idle_timeout_ms if detection else None
        if timeout_ms is None or not is_quiet or self._num_in_a_row >= _MAX_IN_A_ROW:
            self._quiet_since_ns = None
            return False
        if self._quiet_since_ns is None:
            self._quiet_since_ns = now_ns
        if now_ns - self._quiet_since_ns < timeout_ms * 1_000_000:
            return False
        self.since_ns, self._quiet_since_ns = self._quiet_since_ns, None
        self._num_in_a_row += 1
        return True
