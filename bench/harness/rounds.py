"""Interleaved rounds: several sides measured in turn, so that other load on the machine hits all.

Only figures of the same round are divided by each other; what is reported is the median over the
rounds, of the figures and of the ratios.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol, TypeVar

Figures = dict[str, float]
"""Value by name; the unit is the end of the name."""


class Named(Protocol):
    """A side of a comparison."""

    @property
    def name(self) -> str: ...


_Item = TypeVar("_Item")
_Side = TypeVar("_Side", bound=Named)


def rotated(items: Sequence[_Item], round_number: int) -> list[_Item]:
    """``items`` in the order of this round: each of them is first equally often."""
    first = round_number % len(items)
    return [*items[first:], *items[:first]]


@dataclass
class Rounds:
    """Figures of every round by the name of the side; a round may lack figures of a side."""

    figures: dict[str, list[Figures]] = field(default_factory=dict)

    def add(self, figures: dict[str, Figures]) -> None:
        """One round."""
        for name, found in figures.items():
            self.figures.setdefault(name, []).append(found)

    @property
    def sides(self) -> list[str]:
        """Names, in the order of the first round."""
        return list(self.figures)

    def medians(self, side: str) -> Figures:
        """Median of each figure over the rounds that have it."""
        rounds = self.figures[side]
        names = dict.fromkeys(name for figures in rounds for name in figures)
        return {name: median(f[name] for f in rounds if name in f) for name in names}

    def ratios(self, side: str, base: str, least: float = 0.0) -> Figures:
        """Median of ``side`` / ``base`` over the rounds in which both have the figure and that of
        ``base`` is above ``least``; a figure without such a round is left out."""
        found: dict[str, list[float]] = {}
        for ours, theirs in self.pairs(side, base):
            for name in ours.keys() & theirs.keys():
                if theirs[name] > least:
                    found.setdefault(name, []).append(ours[name] / theirs[name])
        return {name: median(found[name]) for name in self.medians(side) if name in found}

    def pairs(self, side: str, base: str) -> list[tuple[Figures, Figures]]:
        """The figures of both sides, round by round."""
        return list(zip(self.figures[side], self.figures[base], strict=True))


async def run_rounds(
    sides: Sequence[_Side],
    workloads: Sequence[Callable[[_Side, str], Awaitable[Figures]]],
    num_rounds: int,
    *,
    seed: str = "round",
    on_round: Callable[[str, dict[str, Figures]], None] = lambda label, figures: None,
) -> Rounds:
    """Run every workload on every side, ``num_rounds`` times after a warm-up that does not count.

    ``workloads`` get the side and a text that differs in every round. ``on_round`` is told each
    round's label and figures.
    """
    rounds = Rounds()
    for number in range(-1, num_rounds):
        figures: dict[str, Figures] = {side.name: {} for side in sides}
        for workload in workloads:
            for side in rotated(sides, number):
                figures[side.name] |= await workload(side, f"{seed} {number}")
        if number >= 0:
            rounds.add(figures)
        on_round("warm-up" if number < 0 else f"round {number + 1} of {num_rounds}", figures)
    return rounds
