"""Line charts as SVG, for results that are kept beside the text that speaks of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 44
# Distinguishable in grey and for eyes that see no red and green.
_COLOURS = ("#1f6fb2", "#d55e00", "#444444", "#8a5fbf", "#117733")
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2")
_NUM_TICKS = 5


@dataclass(frozen=True, slots=True)
class Line:
    """Points (x, y) in order of x."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over one pair of axes from 0. ``limit``: a horizontal line with its name."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    limit: tuple[str, float] | None = None


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
    most_x = max((x for x, _ in points), default=1.0) or 1.0
    most_y = max([y for _, y in points] + [chart.limit[1] if chart.limit else 0.0]) or 1.0
    x_ticks, y_ticks = _ticks(most_x), _ticks(most_y)
    most_x, most_y = max(most_x, x_ticks[-1]), max(most_y, y_ticks[-1])
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + x / most_x * (right - _LEFT),
            bottom - y / most_y * (bottom - _TOP),
        )

    parts = [f'<text x="{_LEFT}" y="16" font-weight="bold">{escape(chart.title)}</text>']
    for tick in y_ticks:
        y = place(0, tick)[1]
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    for tick in x_ticks:
        x = place(tick, 0)[0]
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    parts.append(
        f'<text x="{(right + _LEFT) / 2:.0f}" y="{_HEIGHT - 10}" text-anchor="middle">'
        f"{escape(chart.x_label)}</text>"
        f'<text x="14" y="{(_TOP + bottom) / 2:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 14 {(_TOP + bottom) / 2:.0f})">{escape(chart.y_label)}</text>'
    )
    if chart.limit is not None:
        name, value = chart.limit
        y = place(0, value)[1]
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#b00" stroke-dasharray="3 3"/>'
            f'<text x="{right}" y="{y - 4:.1f}" text-anchor="end" fill="#b00">{escape(name)}</text>'
        )
    for number, line in enumerate(chart.lines):
        parts += _line(number, line, [place(x, y) for x, y in line.points])
    return parts


def _line(number: int, line: Line, places: Sequence[tuple[float, float]]) -> list[str]:
    colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number % len(_DASHES)]
    style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    left = _LEFT + 10 + 130 * number
    return [
        f'<polyline points="{text}" {style}/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places),
        f'<path d="M{left} {_TOP - 8}h22" {style}/>'
        f'<text x="{left + 28}" y="{_TOP - 4}">{escape(line.name)}</text>',
    ]


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 on, the last one at or above ``most``."""
    step = 10.0 ** len(str(int(most))) / 1e6
    sizes = (factor * 10**power * step for power in range(8) for factor in (1, 2, 5))
    size = next(size for size in sizes if most / size <= _NUM_TICKS)
    count = -(-most // size)
    return [round(size * n, 9) for n in range(int(count) + 1)]
