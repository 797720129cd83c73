"""The latency budget of a turn: what each stage may take, and what is done when one took more.

It travels with the turn. A stage that is handed the turn late cannot win the time back, but the
stages after it can be asked for less: a shorter first clause, or a word to bridge the silence. What
was done, and what it saved, is written into the trace; a policy whose saving cannot be measured is
not worth having.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.config import Policy, Settings
from app.conversation.session_config import SessionConfig
from app.observe import STAGE_NAMES, STAGES, BudgetAction, TurnTrace, attribute_us
from audio.text import DEFAULT_LIMITS, ClauseChunker, ClauseLimits
from llm_core import Downgrade

# Of the policies, those that are the engine's to follow.
DOWNGRADES: tuple[Downgrade, ...] = ("partial_context", "shorter_answer")

_BRIDGE_AHEAD_MS = 50.0
# Two or three words: enough to be said by themselves, and their sound covers the next clause.
_SHORT_LIMITS = (
    ClauseLimits(min_sentence_words=1, min_comma_words=1, min_soft_words=2, max_words=3),
    *DEFAULT_LIMITS[1:],
)


@dataclass(frozen=True, slots=True)
class BudgetTargets:
    """Milliseconds: ``total_ms`` from the caller's last voiced sample to the first audible one of
    the answer, ``stages_ms`` for each stage's part of it."""

    total_ms: float
    stages_ms: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings, config: SessionConfig) -> BudgetTargets:
        """The server's, with what the session asked for on top."""
        total_ms = settings.budget_ms if config.budget_ms is None else config.budget_ms
        return cls(float(total_ms), settings.budget_stages_ms)

    def until_end_of(self, stage: str) -> float:
        """What may have passed when ``stage`` is over, for the stages behind it need the rest."""
        behind = STAGE_NAMES[STAGE_NAMES.index(stage) + 1 :]
        return self.total_ms - sum(self.stages_ms.get(name, 0.0) for name in behind)


class TurnBudget:
    """The budget of one turn. Before the turn's beginning is known, nothing is overspent."""

    def __init__(
        self, targets: BudgetTargets, policies: frozenset[Policy], trace: TurnTrace
    ) -> None:
        self.targets = targets
        self.policies = policies
        self._trace = trace
        trace.budget_ms = targets.total_ms
        trace.stage_budgets_ms = dict(targets.stages_ms)
        self._bridge: BudgetAction | None = None
        self._bridged_ns = 0

    @classmethod
    def of(cls, settings: Settings, config: SessionConfig, trace: TurnTrace) -> TurnBudget:
        """As the server's settings and the session want it."""
        return cls(BudgetTargets.of(settings, config), frozenset(settings.budget_policies), trace)

    @property
    def start_ns(self) -> int | None:
        """When the caller stopped speaking; None: not known yet, or the turn is typed."""
        return self._trace.instants.get("speech_end") if self._trace.spoken else None

    @property
    def deadline_ns(self) -> int | None:
        """When the caller should hear something."""
        start_ns = self.start_ns
        return None if start_ns is None else start_ns + int(self.targets.total_ms * 1e6)

    @property
    def behind_first_token_ns(self) -> int:
        """What the stages behind the model's first token need."""
        return int((self.targets.total_ms - self.targets.until_end_of("prefill")) * 1e6)

    @property
    def first_token_deadline_ns(self) -> int | None:
        """When the model should have its first token, for the caller to hear something in time."""
        deadline_ns = self.deadline_ns
        return None if deadline_ns is None else deadline_ns - self.behind_first_token_ns

    @property
    def hurries(self) -> bool:
        """Whether a smaller engine may answer where the first one would be late."""
        return "smaller_model" in self.policies

    @property
    def downgrades(self) -> tuple[Downgrade, ...]:
        """What the engine may give up when it sees that the deadline cannot be met otherwise."""
        return tuple(name for name in DOWNGRADES if name in self.policies)

    def remaining_ms(self, now_ns: int) -> float | None:
        """What is left of the whole; negative when it is overspent."""
        deadline_ns = self.deadline_ns
        return None if deadline_ns is None else (deadline_ns - now_ns) / 1e6

    def overspent_ms(self, stage: str, now_ns: int) -> float:
        """By how much the stages up to ``stage``, which ends now, have taken too long; 0: not."""
        start_ns = self.start_ns
        if start_ns is None:
            return 0.0
        return max(0.0, (now_ns - start_ns) / 1e6 - self.targets.until_end_of(stage))

    def worst_stage(self, now_ns: int) -> str:
        """The stage that is furthest over its target, of those that the turn has been through."""
        start_ns = self.start_ns
        assert start_ns is not None, "asked of a turn that has not begun"
        known = {
            name: (at - start_ns) // 1000
            for name, at in self._trace.instants.items()
            if at <= now_ns
        }
        # What goes on now is the first stage that has not ended.
        running = next((name for _, name in STAGES if name not in known), "first_audio_sent")
        known.setdefault(running, (now_ns - start_ns) // 1000)
        spent_us = attribute_us({**known, "first_audio_sent": (now_ns - start_ns) // 1000})
        over = {
            name: us / 1000 - self.targets.stages_ms.get(name, 0) for name, us in spent_us.items()
        }
        return max(over, key=lambda name: over[name])

    def act(self, policy: Policy, now_ns: int, overspent_ms: float) -> BudgetAction:
        """Note in the trace that ``policy`` is followed; the caller fills in what it saves."""
        start_ns = self.start_ns
        assert start_ns is not None, "nothing is overspent before the turn has begun"
        action = BudgetAction(
            policy=policy,
            stage=self.worst_stage(now_ns),
            at_ms=(now_ns - start_ns) / 1e6,
            overspent_ms=overspent_ms,
        )
        self._trace.actions.append(action)
        return action

    # --- the policy `filler`: a word to bridge the wait ---

    def bridge_wait_s(self, now_ns: int) -> float | None:
        """How long the first clause may still take before something else is said; None: not at all.

        A little before the deadline, for it should be heard by then.
        """
        remaining_ms = self.remaining_ms(now_ns)
        if remaining_ms is None or "filler" not in self.policies:
            return None
        return max(0.0, remaining_ms - _BRIDGE_AHEAD_MS) / 1000

    def bridged(self, now_ns: int) -> None:
        """The filler is being said."""
        overspent_ms = max(0.0, -(self.remaining_ms(now_ns) or 0.0))
        self._bridge, self._bridged_ns = self.act("filler", now_ns, overspent_ms), now_ns

    def answered(self, now_ns: int) -> None:
        """The first clause is there: without the filler, now would have been the first sound."""
        if self._bridge is not None:
            self._bridge.saved_ms = (now_ns - self._bridged_ns) / 1e6


class BudgetedChunker:
    """A ``ClauseChunker`` whose first clause is cut shorter when the turn is late.

    A second chunker with the usual limits goes on in its shadow until it would have cut too; the
    time between the two is what was saved.
    """

    def __init__(self, budget: TurnBudget) -> None:
        self._budget = budget
        self._chunker = ClauseChunker()
        self._shadow: ClauseChunker | None = None
        self._action: BudgetAction | None = None
        self._short_cut_ns = 0
        self._waiting = ""  # the text of the first clause so far
        self._is_first = True

    def feed(self, text: str, now_ns: int) -> list[str]:
        """Adds ``text`` that came at ``now_ns``; returns the clauses that are complete now."""
        if not text:
            return []
        self._watch_shadow(text, now_ns)
        self._waiting += text if self._is_first else ""
        clauses = self._chunker.feed(text)
        if self._is_first and not clauses:
            clauses = self._hurry(now_ns)
        self._is_first = self._is_first and not clauses
        return clauses

    def flush(self, now_ns: int) -> list[str]:
        """Ends the text and returns what is left of it."""
        self._settle(now_ns)
        return self._chunker.flush()

    def _hurry(self, now_ns: int) -> list[str]:
        overspent_ms = self._budget.overspent_ms("prefill", now_ns)
        if "short_first_clause" not in self._budget.policies or not overspent_ms:
            return []
        short = ClauseChunker(_SHORT_LIMITS)
        clauses = short.feed(self._waiting)
        if clauses:
            self._action = self._budget.act("short_first_clause", now_ns, overspent_ms)
            self._short_cut_ns = now_ns
            self._chunker, self._shadow = short, self._chunker
        return clauses

    def _watch_shadow(self, text: str, now_ns: int) -> None:
        if self._shadow is not None and self._shadow.feed(text):
            self._settle(now_ns)

    def _settle(self, now_ns: int) -> None:
        """Now the usual first clause would have been complete."""
        if self._shadow is not None and self._action is not None:
            self._action.saved_ms = (now_ns - self._short_cut_ns) / 1e6
            self._shadow = None
