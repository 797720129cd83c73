"""What operators look at: traces of turns, and the metrics and spans that are made of them."""

from app.observe.canary_statistics import (
    LANES,
    NO_ANSWER,
    CanaryJudge,
    CanaryRules,
    Lane,
    lane_of,
    verdict_of,
)
from app.observe.loop_lag import LoopLag
from app.observe.metrics import Metrics
from app.observe.query import Page, TraceFilter, TraceQuery, period_before, period_ms
from app.observe.retention import Retention
from app.observe.spans import otlp_spans
from app.observe.store import FILE_NAME, TraceStore, Turn
from app.observe.trace import (
    OUTCOMES,
    STAGE_NAMES,
    STAGES,
    BudgetAction,
    TurnOutcome,
    TurnTrace,
    attribute_us,
)
from app.observe.turn_audio import AudioFiles
from app.observe.writer import TraceWriter, TurnSink

__all__ = [
    "AudioFiles",
    "BudgetAction",
    "CanaryJudge",
    "CanaryRules",
    "FILE_NAME",
    "LANES",
    "Lane",
    "LoopLag",
    "Metrics",
    "NO_ANSWER",
    "OUTCOMES",
    "Page",
    "Retention",
    "STAGES",
    "STAGE_NAMES",
    "TraceFilter",
    "TraceQuery",
    "TraceStore",
    "TraceWriter",
    "Turn",
    "TurnOutcome",
    "TurnSink",
    "TurnTrace",
    "attribute_us",
    "lane_of",
    "otlp_spans",
    "period_before",
    "period_ms",
    "verdict_of",
]
