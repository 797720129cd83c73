"""Latency against cut-offs for the features of the end-of-turn detector; fits its weights.

    python -m bench.endpointing.curve docs/turn-end.svg RULE.json tails.npz[,MORE.npz] \
        events.jsonl [MORE.jsonl] [--json OUT]

Reads the files of ``bench.endpointing.events`` and ``bench.endpointing.tails``. Scores are
cross-validated by speaker, those of the rule for the encoder's tail included. For every set of
features the short wait is 300 ms and the long one 1,000 ms, and the threshold between the two moves
along the curve; `fixed silence` varies its one wait. x: mean silence until the end of a turn is
detected, from the last voiced window of the VAD. y: share of the pauses in mid-sentence (0.24 to
1.02 s) that are cut off.

The table has the lowest median and mean silence at which at most 5% of the pauses are cut off, then
the waits in use with these scores. Last, ``audio/endpointing/weights.json`` is printed. The rule is
written to RULE.json, for ``audio/asr/turn_end_probes``, named by the hash of the recogniser.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from audio.asr.hallucination_filter import PunctuationLogprobs
from audio.endpointing.prosody import Prosody
from audio.endpointing.semantic import (
    ENDPOINTING_DELAYS,
    Eagerness,
    choose_delay_ms,
    logprob_feature,
    probe_features,
    prosody_features,
    punctuation_features,
    smart_turn_feature,
    text_features,
)
from bench.harness.plot import Chart, Line, to_svg
from bench.harness.results import Cell, Result, add_json_option, report
from bench.harness.speech import installed_model

Array = NDArray[np.float64]

_SHORT_MS, _LONG_MS = 300, 1_000
_MAX_PAUSE_MS = 1_020
_MOST_CUT = 0.05
_RIDGE = 3.0
_TAIL_RIDGE = 300.0
_NUM_FOLDS = 6
_NUM_STEPS = 12
_NATURAL_WEIGHT = 2.0  # of natural pauses, beside spliced ones, in the fit of the rule
_ANSWER_DELAY_MS = 40.0  # from the end of the turn to the first sound of an eager answer
_WORD_MS = 350.0  # after so much sound the caller has heard a word of the answer
_FEATURES: dict[str, tuple[str, ...]] = {
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


@dataclass(frozen=True)
class _Examples:
    """Training examples of the rule for the encoder's tail."""

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
        """Weights and bias; natural pauses have more weight."""
        rates = np.where(self.is_natural[chosen] & ~self.is_end[chosen], _NATURAL_WEIGHT, 1.0)
        return _fit(self.tails[chosen], self.is_end[chosen], rates, _TAIL_RIDGE)

    def cross_fitted(self, tails: Array, speakers: NDArray[np.str_]) -> Array:
        """Log-odds [n] of ``tails`` by rules fitted without their speakers."""
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
        """Write the rule fitted to all examples."""
        weights, bias = self.fit(np.ones(len(self.tails), dtype=bool))
        rule = {
            "model_bytes": (installed_model("asr_model") / "model.bin").stat().st_size,
            "bias": round(bias, 4),
            "weights": [float(f"{w:.4g}") for w in weights],
        }
        path.write_text(json.dumps(rule) + "\n")


def _print_weights(parts: dict[str, Array], is_end: NDArray[np.bool_]) -> None:
    """``audio/endpointing/weights.json``: one line for each set of features that may be there."""
    optional = ("model", "marks", "tail", "heard")
    rows = []
    for known in itertools.product((True, False), repeat=len(optional)):
        features = ["words", "prosody", *itertools.compress(optional, known)]
        if known[0] and known[2]:
            features.insert(features.index("tail") + 1, "tail, model")
        weights, bias = _fit(np.concatenate([parts[s] for s in features], axis=1), is_end)
        digits = "".join(str(int(is_known)) for is_known in known)
        rows.append(f'"{digits}": {np.round([bias, *weights], 3).tolist()}')
    print("{\n" + ",\n".join(rows) + "\n}")


def _prosody(event: dict[str, Any]) -> tuple[float, ...]:
    levels, rest = event["prosody"][:3], event["prosody"][3:]
    return prosody_features(Prosody(tuple(levels), *rest))


def _logprob(event: dict[str, Any]) -> float:
    value = event["end_logprob"]
    return logprob_feature(-np.inf if value is None else float(value))


def _fit(
    features: Array,
    is_end: NDArray[np.bool_],
    rates: Array | float = 1.0,
    strength: float = _RIDGE,
) -> tuple[Array, float]:
    """Weights and bias of a logistic regression with balanced classes, by Newton's method."""
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
    waits = np.linspace(_SHORT_MS, _LONG_MS, 50)
    return [(float(w), 100 * float((pauses > w).mean())) for w in waits]


def _curve(scores: Array, is_end: NDArray[np.bool_], pauses: Array) -> list[tuple[float, float]]:
    points = []
    for threshold in np.linspace(0, 1, 201):
        waits = np.where(scores >= threshold, _SHORT_MS, _LONG_MS)
        cut = 100 * float((pauses > waits)[~is_end].mean())
        points.append((float(waits[is_end].mean()), cut))
    return points


def _at_most_cut(scores: Array, is_end: NDArray[np.bool_], pauses: Array) -> tuple[float, float]:
    """Median and mean silence at ends of turns, at the lowest threshold that is allowed."""
    for threshold in np.linspace(0, 1, 401):
        waits = np.where(scores >= threshold, _SHORT_MS, _LONG_MS)
        if (pauses > waits)[~is_end].mean() <= _MOST_CUT:
            return float(np.median(waits[is_end])), float(waits[is_end].mean())
    raise AssertionError("the long wait alone cuts too many pauses")


def _in_use(
    eagerness: Eagerness,
    scores: Array,
    events: Sequence[dict[str, Any]],
    is_end: NDArray[np.bool_],
    pauses: Array,
) -> tuple[float, tuple[Cell, ...]]:
    """The product's waits with cross-validated scores: mean silence, and the row of the table."""
    waits = ENDPOINTING_DELAYS[eagerness]
    found = np.array(
        [
            choose_delay_ms(score, event["text"], waits, has_probe=True)
            for score, event in zip(scores, events, strict=True)
        ]
    )
    ends, cut = found[is_end], (pauses > found)[~is_end]
    heard = (pauses > found + _ANSWER_DELAY_MS)[~is_end]
    word_heard = (pauses > found + _ANSWER_DELAY_MS + _WORD_MS)[~is_end]
    is_natural = np.array([not e["is_spliced"] for e in events])[~is_end]
    is_hard = np.array([e["kind"] == "hard" for e in events])[~is_end]
    shares = (cut, cut[is_natural], cut[~is_natural], heard, heard[is_natural], word_heard)
    return float(ends.mean()), (
        *(round(float(ms)) for ms in np.quantile(ends, [0.5, 0.75, 0.9, 0.95])),
        round(float(ends.mean())),
        *(round(float(share.mean()), 4) for share in shares),
        f"{cut[is_hard].sum()} of {is_hard.sum()}",
    )


def _read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Events of all files that a detector judges and whose features are complete."""
    lines = [line for path in paths for line in path.read_text().splitlines()]
    return [
        event
        for event in map(json.loads, lines)
        if (event["is_end"] or event["pause_ms"] <= _MAX_PAUSE_MS)
        and event["end_marks"]
        and event["tail"]
        and not (event["is_end"] and event["is_spliced"])
    ]


def measure(options: argparse.Namespace) -> tuple[Result, Result]:
    """Fit everything, draw the curves; the tables of feature sets and of the waits in use."""
    events = _read(options.events)
    examples = _Examples.read(options.tails.split(","))
    is_end = np.array([e["is_end"] for e in events], dtype=bool)
    is_natural = np.array([not e["is_spliced"] for e in events], dtype=bool) & ~is_end
    pauses = np.array([e["pause_ms"] or 0.0 for e in events])
    speakers = np.array([e["speaker"] for e in events])
    odds = examples.cross_fitted(np.array([e["tail"] for e in events]), speakers)
    model = [_logprob(e) for e in events]
    tail = np.array(
        [probe_features(o, e["text"], m) for o, e, m in zip(odds, events, model, strict=True)]
    )
    parts = {
        "words": np.array([text_features(e["text"]) for e in events]),
        "prosody": np.array([_prosody(e) for e in events]),
        "model": np.array(model)[:, None],
        "marks": np.array(
            [punctuation_features(PunctuationLogprobs(*e["end_marks"][:6])) for e in events]
        ),
        "tail": tail[:, :-1],
        "tail, model": tail[:, -1:],
        "heard": np.array([[smart_turn_feature(e["turn_model"])] for e in events]),
    }
    by_features = Result(
        ("features", "AUC", "AUC, natural pauses", "p50 at 5% cut, ms", "mean at 5% cut, ms"),
        notes=f"{is_end.sum()} ends, {is_natural.sum()} natural pauses, "
        f"{(~is_end & ~is_natural).sum()} spliced ones, {len(set(speakers))} speakers.",
    )
    lines = [Line("fixed silence", _fixed(pauses[~is_end]))]
    used = np.zeros(len(events))
    for name, features in _FEATURES.items():
        columns = np.concatenate([parts[feature] for feature in features], axis=1)
        scores = _cross_validated(columns, is_end, speakers)
        lines.append(Line(name, _curve(scores, is_end, pauses)))
        used = scores if name == _IN_USE else used
        aucs = _auc(scores, is_end), _auc(scores, is_end, is_natural)
        silences = _at_most_cut(scores, is_end, pauses)
        by_features.add(name, *(round(auc, 3) for auc in aucs), *map(round, silences))
    in_use = Result(
        (
            *("eagerness", "p50, ms", "p75, ms", "p90, ms", "p95, ms", "mean, ms"),
            *("pauses cut", "natural", "spliced", "an answer heard", "natural", "a word heard"),
            "cut in the hard set",
        )
    )
    for eagerness in ("high", "medium", "low"):
        mean_ms, row = _in_use(eagerness, used, events, is_end, pauses)
        in_use.add(eagerness, *row)
        if eagerness == "medium":
            lines.append(Line("in use", [(mean_ms, 100 * cast(float, row[5]))]))
    chart = Chart(
        "Detection of the end of a turn",
        "mean silence until the end of a turn is detected, ms",
        "% of pauses in mid-sentence cut off",
        lines,
        x_from=_SHORT_MS,
    )
    options.svg.write_text(to_svg([chart]), encoding="utf-8")
    examples.write_rule(options.rule)
    _print_weights(parts, is_end)
    return by_features, in_use


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("svg", type=Path)
    parser.add_argument("rule", type=Path)
    parser.add_argument("tails", help="files, with commas between them")
    parser.add_argument("events", type=Path, nargs="+")
    add_json_option(parser)
    options = parser.parse_args()
    by_features, in_use = measure(options)
    by_features.details = {"in use": {str(row[0]): list(row[1:]) for row in in_use.rows}}
    report(by_features, options)
    print("\n" + "\n".join(in_use.lines()))


if __name__ == "__main__":
    main()
