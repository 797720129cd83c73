"""Line charts as SVG files without scripts, equal for equal figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 780, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 240, 34, 44
# Distinguishable in grey and by people who do not see red and green.
_COLOURS = ("#1f6fb2", "#d55e00", "#444444", "#8a5fbf", "#117733")
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2")
_NUM_TICKS = 5
_LEGEND_STEP = 18

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """Points (x, y) in order of x; a single one is drawn as a dot."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over one pair of axes. y starts at 0, x at ``x_from``. ``limit``: name and y of a
    horizontal line."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    limit: tuple[str, float] | None = None
    x_from: float = 0.0


def to_svg(charts: Sequence[Chart]) -> str:
    """The charts, one below the other."""
    height = _HEIGHT * len(charts)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, chart in enumerate(charts):
        parts.append(f'<g transform="translate(0 {number * _HEIGHT})">')
        parts += _chart(chart)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _chart(chart: Chart) -> list[str]:
    points = [point for line in chart.lines for point in line.points]
    most_x = max((x for x, _ in points), default=chart.x_from + 1.0)
    most_y = max([y for _, y in points] + [chart.limit[1] if chart.limit else 0.0]) or 1.0
    x_ticks = [chart.x_from + tick for tick in _ticks(most_x - chart.x_from or 1.0)]
    y_ticks = _ticks(most_y)
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def place(x: float, y: float) -> Point:
        share = (x - chart.x_from) / (x_ticks[-1] - chart.x_from)
        return _LEFT + share * (right - _LEFT), bottom - y / y_ticks[-1] * (bottom - _TOP)

    parts = [f'<text x="{_LEFT}" y="16" font-weight="bold">{escape(chart.title)}</text>']
    for tick in y_ticks:
        y = place(chart.x_from, tick)[1]
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    for tick in x_ticks:
        x = place(tick, 0)[0]
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    middle = (_TOP + bottom) / 2
    parts.append(
        f'<text x="{(right + _LEFT) / 2:.0f}" y="{_HEIGHT - 10}" text-anchor="middle">'
        f"{escape(chart.x_label)}</text>"
        f'<text x="14" y="{middle:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 14 {middle:.0f})">{escape(chart.y_label)}</text>'
    )
    if chart.limit is not None:
        name, value = chart.limit
        y = place(chart.x_from, value)[1]
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#b00" stroke-dasharray="3 3"/>'
            f'<text x="{right}" y="{y - 4:.1f}" text-anchor="end" fill="#b00">{escape(name)}</text>'
        )
    for number, line in enumerate(chart.lines):
        parts += _line(number, line, [place(x, y) for x, y in line.points])
    return parts


def _line(number: int, line: Line, places: Sequence[Point]) -> list[str]:
    colour = _COLOURS[number % len(_COLOURS)]
    dash = _DASHES[(number + number // len(_COLOURS)) % len(_DASHES)]
    style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    left, top = _WIDTH - _RIGHT + 14, _TOP + 8 + _LEGEND_STEP * number
    radius = 5 if len(places) == 1 else 2
    return [
        f'<polyline points="{text}" {style}/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"/>' for x, y in places),
        f'<path d="M{left} {top - 4}h22" {style}/>'
        f'<text x="{left + 28}" y="{top}">{escape(line.name)}</text>',
    ]


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 on, the last one at or above ``most``."""
    step = 10.0 ** len(str(int(most))) / 1e6
    sizes = (factor * 10**power * step for power in range(8) for factor in (1, 2, 5))
    size = next(size for size in sizes if most / size <= _NUM_TICKS)
    count = -(-most // size)
    return [round(size * n, 9) for n in range(int(count) + 1)]
