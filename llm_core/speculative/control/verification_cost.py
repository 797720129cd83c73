"""How long a step of the target takes, by its number of rows: where a further row is free, and
where each one costs.

Unlike ``step_cost``, whose line is good enough for prompts, this knows single rows: on one machine
the second is free and the third is not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

_KNOTS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
_LOAD_WEIGHT = 0.1  # of the newest step: what else the machine does changes within seconds
_SHAPE_WEIGHT = 0.02  # how rows compare with each other changes slowly (longer contexts)
_OUTLIER = 3.0  # a step that took so many times what is usual says nothing


class VerificationCost:
    """Durations at some numbers of rows and lines between them, times a factor for the load."""

    def __init__(self, measured_ns: Mapping[int, float]) -> None:
        """``measured_ns``: by number of rows, at least one of them; see ``calibration``."""
        assert measured_ns, "something was measured"
        points = sorted(measured_ns.items())
        # More rows never take less time: what looks like it is noise.
        for index in range(len(points) - 2, -1, -1):
            points[index] = (points[index][0], min(points[index][1], points[index + 1][1]))
        self._shape = [(rows, _between(points, rows)) for rows in _KNOTS]
        self._load = 1.0
        self._num_seen = 0

    @property
    def load(self) -> float:
        """Times what was measured at the start that steps take now."""
        return self._load

    def ns(self, num_rows: int) -> float:
        """What a step of ``num_rows`` takes now."""
        return self._load * _between(self._shape, num_rows)

    def observe(self, num_rows: int, duration_ns: int) -> None:
        """One step more."""
        expected_ns = self.ns(num_rows)
        if not expected_ns / _OUTLIER < duration_ns < expected_ns * _OUTLIER:
            # Twice in a row it is no outlier: let the load follow, slowly.
            duration_ns = round(min(max(duration_ns, expected_ns / 2), expected_ns * 2))
        ratio = duration_ns / expected_ns
        self._num_seen += 1
        # The first steps count fully: what was measured at the start may be of another minute, and
        # times taken while the load is still on its way cannot be compared with later ones.
        self._load *= 1 + max(_LOAD_WEIGHT, 1 / self._num_seen) * (ratio - 1)
        nearest = min(bisect_left(_KNOTS, num_rows), len(_KNOTS) - 1)
        if _KNOTS[nearest] == num_rows:
            known_ns = self._shape[nearest][1]
            self._shape[nearest] = num_rows, known_ns * (1 + _SHAPE_WEIGHT * (ratio - 1))


class DraftCost:
    """How long a drafter takes for one sequence: the first draft, and each that follows it."""

    def __init__(self, measured_ns: Mapping[int, float]) -> None:
        """``measured_ns``: by depth of a chain, depth 1 among them; see ``calibration``."""
        first_ns = measured_ns[1]
        depth = max(measured_ns)
        self._first_ns = first_ns
        further_ns = first_ns if depth == 1 else (measured_ns[depth] - first_ns) / (depth - 1)
        self.step_ns = min(max(further_ns, 0.1 * first_ns), first_ns)

    def ns(self, depth: int) -> float:
        """A chain of ``depth`` drafts, or a tree as deep."""
        return self._first_ns + (depth - 1) * self.step_ns


def _between(points: list[tuple[int, float]], num_rows: int) -> float:
    """On the line through the neighbours; beyond the last, on the last line."""
    if len(points) == 1:
        return points[0][1] * max(1.0, num_rows / points[0][0])
    at = bisect_left(points, (num_rows, 0.0))
    at = min(max(at, 1), len(points) - 1)
    (left, left_ns), (right, right_ns) = points[at - 1 : at + 1]
    return max(left_ns, left_ns + (right_ns - left_ns) * (num_rows - left) / (right - left))
