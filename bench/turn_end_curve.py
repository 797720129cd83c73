"""Latency against cut-offs for every sign of the end of a turn: fits the weights, draws the curve.

    PYTHONPATH=. python bench/turn_end_curve.py events.jsonl docs/turn-end.svg

Reads what bench/turn_end_events.py wrote. Scores are cross-validated: no speaker is judged by
weights that have heard them. For every sign the short wait is 200 ms and the long one 1,100 ms, and
the threshold between the two moves along the curve; `fixed silence` moves its one wait. Across:
mean silence until a true end is taken for one. Up: share of the pauses in mid-sentence (0.24 to
1.02 s) that are cut off.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audio.prosody import Prosody
from audio.turn_end import WAITS, Completeness, Evidence, judge, score, silence_ms

Array = NDArray[np.float64]

_SHORT_MS, _LONG_MS = 200, 1_100
_MAX_PAUSE_MS = 1_020
_RIDGE = 1.0
_SIGNS: dict[str, tuple[str, ...]] = {
    "words": ("words",),
    "prosody": ("prosody",),
    "model": ("model",),
    "words + prosody": ("words", "prosody"),
    "all together": ("words", "prosody", "model"),
}
_COLOURS = ("#888888", "#c55a11", "#2e75b6", "#548235", "#7030a0", "#111111")


def main() -> None:
    """Fit, print and draw."""
    events = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    events = [e for e in events if e["is_end"] or e["pause_ms"] <= _MAX_PAUSE_MS]
    is_end = np.array([e["is_end"] for e in events], dtype=bool)
    pauses = np.array([e["pause_ms"] or 0.0 for e in events])
    speakers = np.array([e["speaker"] for e in events])
    parts = {
        "words": np.array([_words(e) for e in events]),
        "prosody": np.array([e["prosody"] for e in events]),
        "model": np.array([[_logprob(e)] for e in events]),
    }
    print(f"{is_end.sum()} ends, {(~is_end).sum()} pauses, {len(set(speakers))} speakers")
    curves = [("fixed silence", _fixed(pauses[~is_end]))]
    for name, signs in _SIGNS.items():
        features = np.concatenate([parts[sign] for sign in signs], axis=1)
        scores = _cross_validated(features, is_end, speakers)
        curves.append((name, _curve(scores, is_end, pauses)))
        weights, bias = _fit(features, is_end)
        shown = np.round(weights, 3).tolist()
        print(f"{name}: AUC {_auc(scores, is_end):.3f}, weights {shown}, bias {bias:.3f}")
    point = _shipped(events, is_end, pauses)
    print(f"as shipped: ends after {point[0]:.0f} ms (mean), {point[1]:.1%} of the pauses cut")
    Path(sys.argv[2]).write_text(_svg(curves, point))


def _words(event: dict[str, Any]) -> list[float]:
    kind = judge(event["text"])
    return [
        float(kind is Completeness.QUESTION),
        float(kind is Completeness.SENTENCE),
        float(kind is Completeness.COUNTING),
        float(kind is Completeness.TRAILING),
    ]


def _logprob(event: dict[str, Any]) -> float:
    value = event["end_logprob"]
    return -6.0 if value is None else max(float(value), -6.0)


def _fit(features: Array, is_end: NDArray[np.bool_]) -> tuple[Array, float]:
    """Logistic regression with both classes of equal weight, by Newton's method."""
    mean, spread = features.mean(axis=0), features.std(axis=0) + 1e-6
    design = np.column_stack(((features - mean) / spread, np.ones(len(features))))
    target = is_end.astype(np.float64)
    balance = np.where(is_end, 0.5 / target.mean(), 0.5 / (1 - target.mean()))
    weights = np.zeros(design.shape[1])
    for _ in range(50):
        guess = 1 / (1 + np.exp(-design @ weights))
        gradient = design.T @ (balance * (guess - target)) + _RIDGE * np.append(weights[:-1], 0)
        curvature = (design * (balance * guess * (1 - guess))[:, None]).T @ design
        weights -= np.linalg.solve(curvature + _RIDGE * np.eye(len(weights)), gradient)
    plain = weights[:-1] / spread
    return plain, float(weights[-1] - plain @ mean)


def _cross_validated(features: Array, is_end: NDArray[np.bool_], speakers: Any) -> Array:
    scores = np.zeros(len(features))
    for speaker in set(speakers):
        others = speakers != speaker
        weights, bias = _fit(features[others], is_end[others])
        scores[~others] = 1 / (1 + np.exp(-(features[~others] @ weights + bias)))
    return scores


def _auc(scores: Array, is_end: NDArray[np.bool_]) -> float:
    ends, pauses = scores[is_end][:, None], scores[~is_end][None]
    return float((ends > pauses).mean() + 0.5 * (ends == pauses).mean())


def _fixed(pauses: Array) -> list[tuple[float, float]]:
    return [(w, float((pauses > w).mean())) for w in np.linspace(_SHORT_MS, _LONG_MS, 50)]


def _curve(scores: Array, is_end: NDArray[np.bool_], pauses: Array) -> list[tuple[float, float]]:
    points = []
    for threshold in np.linspace(0, 1, 201):
        waits = np.where(scores >= threshold, _SHORT_MS, _LONG_MS)
        points.append((float(waits[is_end].mean()), float((pauses > waits)[~is_end].mean())))
    return points


def _shipped(
    events: Sequence[dict[str, Any]], is_end: NDArray[np.bool_], pauses: Array
) -> tuple[float, float]:
    """The policy as it is, with its own weights (fitted on all of this)."""
    waits = []
    for event in events:
        p = event["prosody"]
        evidence = Evidence(event["text"], Prosody(tuple(p[:3]), *p[3:]), event["end_logprob"])
        assert 0 < score(evidence) < 1
        waits.append(silence_ms(evidence, "auto"))
    found = np.array(waits)
    quantiles = np.quantile(found[is_end], [0.5, 0.9, 0.95])
    print("waits at true ends, p50 p90 p95:", quantiles.round(), "of", WAITS["auto"])
    return float(found[is_end].mean()), float((pauses > found)[~is_end].mean())


def _svg(curves: list[tuple[str, list[tuple[float, float]]]], shipped: tuple[float, float]) -> str:
    """The curves, drawn by hand: 640 by 420."""
    left, top, width, height = 60, 20, 420, 340

    def place(point: tuple[float, float]) -> str:
        x = left + (point[0] - _SHORT_MS) / (_LONG_MS - _SHORT_MS) * width
        return f"{x:.1f},{top + (1 - point[1]) * height:.1f}"

    out = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 660 420" font-family="sans-serif" '
        'font-size="12"><rect width="660" height="420" fill="white"/>'
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = top + (1 - share) * height
        out.append(f'<path d="M{left} {y}h{width}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{share:.0%}</text>')
    for wait_ms in range(_SHORT_MS, _LONG_MS + 1, 150):
        x = left + (wait_ms - _SHORT_MS) / (_LONG_MS - _SHORT_MS) * width
        out.append(f'<text x="{x}" y="{top + height + 18}" text-anchor="middle">{wait_ms}</text>')
    middle = left + width / 2
    out.append(
        f'<text x="{middle}" y="{top + height + 40}" text-anchor="middle">'
        "mean silence until a true end is taken for one, ms</text>"
        f'<text x="16" y="{top + height / 2}" text-anchor="middle" transform="rotate(-90 16 '
        f'{top + height / 2})">pauses in mid-sentence cut off</text>'
    )
    for number, ((name, points), colour) in enumerate(zip(curves, _COLOURS, strict=True)):
        path = " ".join(place(point) for point in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = top + 20 + 20 * number
        out.append(f'<path d="M500 {y}h24" stroke="{colour}" stroke-width="2"/>')
        out.append(f'<text x="530" y="{y + 4}">{name}</text>')
    x, y = place(shipped).split(",")
    out.append(f'<circle cx="{x}" cy="{y}" r="5" fill="#111"/>')
    legend = top + 20 + 20 * len(curves)
    out.append(
        f'<circle cx="512" cy="{legend}" r="5"/><text x="530" y="{legend + 4}">shipped</text>'
    )
    return "\n".join([*out, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
