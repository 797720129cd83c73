"""Latency against cut-offs for every sign of the end of a turn: fits the weights, draws the curve.

    python -m bench.endpointing.curve docs/turn-end.svg RULE.json tails.npz[,MORE.npz] \
        events.jsonl [MORE.jsonl]

Reads what ``bench.endpointing.events`` and ``bench.endpointing.tails`` wrote. Scores are
cross-validated: no speaker is judged by weights that have heard them, those of the tail's rule
included. For every sign the short wait is 300 ms and the long one 1,000 ms, and the threshold
between the two moves along the curve; `fixed silence` moves its one wait. Across: mean silence
until a true end is taken for one, behind the VAD's last voiced window. Up: share of the pauses in
mid-sentence (0.24 to 1.02 s) that are cut off.

Printed: for each sign the lowest median and mean silence at which no more than 5 % of the pauses
are cut off; how the waits in use do with these scores; last, what
``audio/endpointing/weights.json`` holds. The tail's rule is written to RULE.json, for
``audio/end_rules``, where the recogniser's hash is its name.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.config import load_settings
from app.models.store import ModelStore
from audio.asr.hallucination_filter import PunctuationLogprobs
from audio.endpointing.prosody import Prosody
from audio.endpointing.semantic import (
    WAITS,
    Eagerness,
    ear_signs,
    heard_sign,
    logprob_sign,
    mark_signs,
    prosody_signs,
    wait_ms,
    words_signs,
)

Array = NDArray[np.float64]

_SHORT_MS, _LONG_MS = 300, 1_000
_MAX_PAUSE_MS = 1_020
_MOST_CUT = 0.05
_RIDGE = 3.0
_TAIL_RIDGE = 300.0
_NUM_FOLDS = 6
_NUM_STEPS = 12
# For the tail's rule: of pauses that somebody made, not we.
_NATURAL_WEIGHT = 2.0
# With this much sound made already the answer begins so long after its turn has ended.
_HEARD_AFTER_MS = 40.0
# Whoever goes on later than this behind the first sound has heard a word: it is not taken back.
_WORD_MS = 350.0
_SIGNS: dict[str, tuple[str, ...]] = {
    "words": ("words",),
    "prosody": ("prosody",),
    "model": ("model",),
    "marks": ("marks",),
    "tail": ("tail",),
    "turn model": ("heard",),
    "words + prosody": ("words", "prosody"),
    "words + prosody + model + marks": ("words", "prosody", "model", "marks"),
    "all but the turn model": ("words", "prosody", "model", "marks", "tail", "tail, model"),
    "all together": ("words", "prosody", "model", "marks", "tail", "tail, model", "heard"),
}
_IN_USE = "all but the turn model"
_COLOURS = (
    "#888888",
    "#c55a11",
    "#2e75b6",
    "#548235",
    "#bf9000",
    "#7030a0",
    "#c00000",
    "#00a0a0",
    "#d4488e",
    "#8a6d3b",
    "#111111",
)


def main() -> None:
    """Fit, print and draw."""
    svg_path, rule_path, tails_paths, *events_paths = sys.argv[1:]
    lines = [line for path in events_paths for line in Path(path).read_text().splitlines()]
    events = [json.loads(line) for line in lines]
    events = [e for e in events if e["is_end"] or e["pause_ms"] <= _MAX_PAUSE_MS]
    events = [e for e in events if e["end_marks"] and e["tail"]]
    events = [e for e in events if not (e["is_end"] and e["is_spliced"])]
    examples = _Examples.read(tails_paths.split(","))
    is_end = np.array([e["is_end"] for e in events], dtype=bool)
    is_natural = np.array([not e["is_spliced"] for e in events], dtype=bool) & ~is_end
    pauses = np.array([e["pause_ms"] or 0.0 for e in events])
    speakers = np.array([e["speaker"] for e in events])
    odds = examples.cross_fitted(np.array([e["tail"] for e in events]), speakers)
    model = [_logprob(e) for e in events]
    ear = np.array(
        [ear_signs(o, e["text"], m) for o, e, m in zip(odds, events, model, strict=True)]
    )
    parts = {
        "words": np.array([words_signs(e["text"]) for e in events]),
        "prosody": np.array([_prosody(e) for e in events]),
        "model": np.array(model)[:, None],
        "marks": np.array([mark_signs(PunctuationLogprobs(*e["end_marks"][:6])) for e in events]),
        "tail": ear[:, :-1],
        "tail, model": ear[:, -1:],
        "heard": np.array([[heard_sign(e["turn_model"])] for e in events]),
    }
    print(
        f"{is_end.sum()} ends, {is_natural.sum()} pauses that were made, "
        f"{(~is_end & ~is_natural).sum()} spliced ones, {len(set(speakers))} speakers"
    )
    curves = [("fixed silence", _fixed(pauses[~is_end]))]
    used = np.zeros(len(events))
    for name, signs in _SIGNS.items():
        features = np.concatenate([parts[sign] for sign in signs], axis=1)
        scores = _cross_validated(features, is_end, speakers)
        curves.append((name, _curve(scores, is_end, pauses)))
        used = scores if name == _IN_USE else used
        median_ms, mean_ms = _at_most_cut(scores, is_end, pauses)
        print(
            f"{name}: AUC {_auc(scores, is_end):.3f} ({_auc(scores, is_end, is_natural):.3f} with "
            f"pauses that were made), {_MOST_CUT:.0%} cut at p50 {median_ms:.0f}, mean "
            f"{mean_ms:.0f} ms"
        )
    for eagerness in ("high", "medium", "low"):
        point = _in_use(eagerness, used, events, is_end, pauses)
        if eagerness == "medium":
            shipped = point
    Path(svg_path).write_text(_svg(curves, shipped))
    examples.write_rule(Path(rule_path))
    _print_weights(parts, is_end)


@dataclass(frozen=True)
class _Examples:
    """What the rule of the tail is fitted to."""

    tails: Array
    is_end: NDArray[np.bool_]
    is_natural: NDArray[np.bool_]
    speakers: NDArray[np.str_]

    @classmethod
    def read(cls, paths: Sequence[str]) -> _Examples:
        files = [np.load(path) for path in paths]

        def all_of(name: str) -> Any:
            return np.concatenate([file[name] for file in files])

        names = ("tails", "is_end", "is_natural", "speakers")
        return cls(*(all_of(name) for name in names))

    def fit(self, chosen: NDArray[np.bool_]) -> tuple[Array, float]:
        """Weights and bias; pauses that somebody made count more."""
        rates = np.where(self.is_natural[chosen] & ~self.is_end[chosen], _NATURAL_WEIGHT, 1.0)
        return _fit(self.tails[chosen], self.is_end[chosen], rates, _TAIL_RIDGE)

    def cross_fitted(self, tails: Array, speakers: NDArray[np.str_]) -> Array:
        """Log-odds [n] of ``tails`` by rules that have not heard their speakers."""
        names = sorted({*speakers, *self.speakers})
        folds = np.random.default_rng(0).integers(_NUM_FOLDS, size=len(names))
        fold_of = dict(zip(names, folds.tolist(), strict=True))
        own = np.array([fold_of[name] for name in self.speakers])
        theirs = np.array([fold_of[name] for name in speakers])
        odds = np.zeros(len(tails))
        for fold in range(_NUM_FOLDS):
            weights, bias = self.fit(own != fold)
            odds[theirs == fold] = tails[theirs == fold] @ weights + bias
        return odds

    def write_rule(self, path: Path) -> None:
        """The rule fitted to all of them."""
        weights, bias = self.fit(np.ones(len(self.tails), dtype=bool))
        rule = {
            "model_bytes": (_recogniser() / "model.bin").stat().st_size,
            "bias": round(bias, 4),
            "weights": [float(f"{w:.4g}") for w in weights],
        }
        path.write_text(json.dumps(rule) + "\n")


def _recogniser() -> Path:
    """The model whose tails were collected: that of the settings."""
    settings = load_settings()
    return ModelStore(settings.home).resolve(settings.asr_model)


def _print_weights(parts: dict[str, Array], is_end: NDArray[np.bool_]) -> None:
    """``audio/endpointing/weights.json``, one line for everything that may be known."""
    optional = ("model", "marks", "tail", "heard")
    rows = []
    for known in itertools.product((True, False), repeat=len(optional)):
        signs = ["words", "prosody", *itertools.compress(optional, known)]
        if known[0] and known[2]:
            signs.insert(signs.index("tail") + 1, "tail, model")
        weights, bias = _fit(np.concatenate([parts[s] for s in signs], axis=1), is_end)
        digits = "".join(str(int(is_known)) for is_known in known)
        rows.append(f'"{digits}": {np.round([bias, *weights], 3).tolist()}')
    print("{\n" + ",\n".join(rows) + "\n}")


def _prosody(event: dict[str, Any]) -> tuple[float, ...]:
    levels, rest = event["prosody"][:3], event["prosody"][3:]
    return prosody_signs(Prosody(tuple(levels), *rest))


def _logprob(event: dict[str, Any]) -> float:
    value = event["end_logprob"]
    return logprob_sign(-np.inf if value is None else float(value))


def _fit(
    features: Array,
    is_end: NDArray[np.bool_],
    rates: Array | float = 1.0,
    strength: float = _RIDGE,
) -> tuple[Array, float]:
    """Logistic regression with both classes of equal weight, by Newton's method."""
    mean, spread = features.mean(axis=0), features.std(axis=0) + 1e-6
    design = np.column_stack(((features - mean) / spread, np.ones(len(features))))
    target = is_end.astype(np.float64)
    balance = rates * np.where(is_end, 0.5 / target.mean(), 0.5 / (1 - target.mean()))
    ridge = np.full(design.shape[1], strength)
    ridge[-1] = 0.0
    weights = np.zeros(design.shape[1])
    for _ in range(_NUM_STEPS):
        guess = 1 / (1 + np.exp(-design @ weights))
        gradient = design.T @ (balance * (guess - target)) + ridge * weights
        curvature = (design * (balance * guess * (1 - guess))[:, None]).T @ design
        weights -= np.linalg.solve(curvature + np.diag(ridge), gradient)
    plain = weights[:-1] / spread
    return plain, float(weights[-1] - plain @ mean)


def _cross_validated(features: Array, is_end: NDArray[np.bool_], speakers: Any) -> Array:
    scores = np.zeros(len(features))
    for speaker in set(speakers):
        others = speakers != speaker
        weights, bias = _fit(features[others], is_end[others])
        scores[~others] = 1 / (1 + np.exp(-(features[~others] @ weights + bias)))
    return scores


def _auc(
    scores: Array, is_end: NDArray[np.bool_], is_pause: NDArray[np.bool_] | None = None
) -> float:
    ends, pauses = scores[is_end][:, None], scores[~is_end if is_pause is None else is_pause][None]
    return float((ends > pauses).mean() + 0.5 * (ends == pauses).mean())


def _fixed(pauses: Array) -> list[tuple[float, float]]:
    return [(w, float((pauses > w).mean())) for w in np.linspace(_SHORT_MS, _LONG_MS, 50)]


def _curve(scores: Array, is_end: NDArray[np.bool_], pauses: Array) -> list[tuple[float, float]]:
    points = []
    for threshold in np.linspace(0, 1, 201):
        waits = np.where(scores >= threshold, _SHORT_MS, _LONG_MS)
        points.append((float(waits[is_end].mean()), float((pauses > waits)[~is_end].mean())))
    return points


def _at_most_cut(scores: Array, is_end: NDArray[np.bool_], pauses: Array) -> tuple[float, float]:
    """Median and mean silence at true ends, at the threshold that cuts as many as is allowed."""
    for threshold in np.linspace(0, 1, 401):
        waits = np.where(scores >= threshold, _SHORT_MS, _LONG_MS)
        if (pauses > waits)[~is_end].mean() <= _MOST_CUT:
            return float(np.median(waits[is_end])), float(waits[is_end].mean())
    raise AssertionError("with the long wait alone hardly any pause is cut")


def _in_use(
    eagerness: Eagerness,
    scores: Array,
    events: Sequence[dict[str, Any]],
    is_end: NDArray[np.bool_],
    pauses: Array,
) -> tuple[float, float]:
    """The waits as they are, with cross-validated scores: mean silence, share cut."""
    waits = WAITS[eagerness]
    found = np.array(
        [
            wait_ms(score, event["text"], waits, is_heard=True)
            for score, event in zip(scores, events, strict=True)
        ]
    )
    ends, cut = found[is_end], (pauses > found)[~is_end]
    heard = (pauses > found + _HEARD_AFTER_MS)[~is_end]
    lasting = (pauses > found + _HEARD_AFTER_MS + _WORD_MS)[~is_end]
    is_made = np.array([not e["is_spliced"] for e in events])[~is_end]
    is_hard = np.array([e["kind"] == "hard" for e in events])[~is_end]
    p50, p75, p90, p95 = np.quantile(ends, [0.5, 0.75, 0.9, 0.95])
    print(
        f"{eagerness}: true ends after p50 {p50:.0f}, p75 {p75:.0f}, p90 {p90:.0f}, p95 "
        f"{p95:.0f}, mean {ends.mean():.0f} ms; pauses cut {cut.mean():.1%} (made "
        f"{cut[is_made].mean():.1%}, spliced {cut[~is_made].mean():.1%}, {cut[is_hard].sum()} of "
        f"the hard set's {is_hard.sum()}), an answer heard in {heard.mean():.1%} (made "
        f"{heard[is_made].mean():.1%}), a word of it in {lasting.mean():.1%}"
    )
    return float(ends.mean()), float(cut.mean())


def _svg(curves: list[tuple[str, list[tuple[float, float]]]], shipped: tuple[float, float]) -> str:
    """The curves, drawn by hand: 720 by 420."""
    left, top, width, height = 60, 20, 420, 340

    def place(point: tuple[float, float]) -> str:
        x = left + (point[0] - _SHORT_MS) / (_LONG_MS - _SHORT_MS) * width
        return f"{x:.1f},{top + (1 - point[1]) * height:.1f}"

    out = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 420" font-family="sans-serif" '
        'font-size="12"><rect width="720" height="420" fill="white"/>'
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = top + (1 - share) * height
        out.append(f'<path d="M{left} {y}h{width}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{share:.0%}</text>')
    for at_ms in range(_SHORT_MS, _LONG_MS + 1, 100):
        x = left + (at_ms - _SHORT_MS) / (_LONG_MS - _SHORT_MS) * width
        out.append(f'<text x="{x}" y="{top + height + 18}" text-anchor="middle">{at_ms}</text>')
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
