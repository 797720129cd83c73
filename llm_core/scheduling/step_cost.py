"""How long a step takes, learnt from the steps: a fixed part, and a part for each row."""

from __future__ import annotations

_FORGET = 0.02  # weight of the newest step: some fifty steps are remembered
_LEAST_SPREAD = 2.0  # standard deviation of the row counts from which a slope is believed


class StepCost:
    """A line through (rows, duration) by least squares, older steps counting less.

    Until it has seen steps of different sizes it knows nothing, and says so; when steps are all
    alike again it keeps what it knew.
    """

    def __init__(self) -> None:
        self._weight = self._rows = self._rows2 = self._ns = self._rows_ns = 0.0
        self._line_ns: tuple[float, float] | None = None

    def observe(self, num_rows: int, duration_ns: int) -> None:
        """One step more."""
        keep = 1 - _FORGET
        self._weight = keep * self._weight + 1
        self._rows = keep * self._rows + num_rows
        self._rows2 = keep * self._rows2 + num_rows**2
        self._ns = keep * self._ns + duration_ns
        self._rows_ns = keep * self._rows_ns + num_rows * duration_ns
        spread = self._weight * self._rows2 - self._rows**2
        if spread >= (self._weight * _LEAST_SPREAD) ** 2:
            slope = (self._weight * self._rows_ns - self._rows * self._ns) / spread
            per_row = min(max(0.0, slope), self._ns / self._rows)
            self._line_ns = ((self._ns - per_row * self._rows) / self._weight, per_row)

    @property
    def line_ns(self) -> tuple[float, float] | None:
        """(fixed, per row), neither negative; None while unknown."""
        return self._line_ns

    def duration_ns(self, num_rows: int) -> int | None:
        """What a step of ``num_rows`` rows takes; None while unknown."""
        line = self.line_ns
        return None if line is None else round(line[0] + line[1] * num_rows)

    def rows_within(self, duration_ns: int) -> int | None:
        """How many rows fit into a step of that length; None while unknown."""
        line = self.line_ns
        if line is None or line[1] == 0:
            return None
        return max(0, int((duration_ns - line[0]) / line[1]))
