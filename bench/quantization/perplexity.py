"""What fewer bits a weight cost, in perplexity, with the error of the measurement.

    python -m bench.quantization.perplexity MODEL WORK formats --own 56 --text NAME=FILE ...
    python -m bench.quantization.perplexity MODEL WORK methods --own 12 --text NAME=FILE --seeds \
        1 2 3
    python -m bench.quantization.perplexity MODEL WORK table

``formats`` compares forms of the weights (and of activations) that need no calibration; ``methods``
RTN, GPTQ and AWQ at the same group sizes, on grids made by the same rule, calibrated with the same
conversations that the model writes from each seed. Texts: conversations that the model writes from
another seed (--own: how many), and files (.jsonl: the "turns"; .tsv: the column "text"). Everything
is read in windows of 256, float32 arithmetic unless the row says otherwise. WORK/results.json keeps
what was measured, so an interrupted run goes on; ``table`` prints it: the change of the perplexity
against float32 with the standard error of that change, from differences window by window.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from llm_core.loading.model_files import OpenModel, open_model
from llm_core.loading.safetensors import SafetensorsFile
from llm_core.loading.safetensors_writer import write_safetensors
from llm_core.messages import EngineConfig
from llm_core.model.runner import ModelRunner
from llm_core.offline.perplexity import surprisals, windows_of
from llm_core.offline.quantize.layers import LayerMethod, LayerRecipe, quantize_layers
from llm_core.offline.quantize.rounding import GridSpec, round_to_nearest
from llm_core.offline.self_text import write_conversations
from llm_core.offline.texts import generation_runner
from llm_core.offline.trainable_decoder import TrainableDecoder
from llm_core.quant.formats import quantize_float8, quantize_int8

WINDOW_LEN = 256
EVALUATION_SEED = 1000  # of --own; calibration takes others
WINDOWS_AT_ONCE = 4
NUM_CALIBRATION_WINDOWS = 56  # what `parley quantize` keeps of its 64
Results = dict[str, dict[str, list[float]]]
Windows = Mapping[str, torch.Tensor]


# --- texts ----------------------------------------------------------------------------------------


def file_text(path: Path) -> str:
    """The words of a file, whatever its form."""
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        return "\n\n".join(turn for row in rows for turn in row["turns"])
    if path.suffix == ".tsv":
        with path.open(encoding="utf-8", newline="") as file:
            return "\n".join(row["text"] for row in csv.DictReader(file, delimiter="\t"))
    return path.read_text("utf-8")


def conversations(opened: OpenModel, model: str, work: Path, count: int, seed: int) -> torch.Tensor:
    """int64 [count, WINDOW_LEN] that the model writes; kept in ``work``, the same every time."""
    kept = work / f"own-{seed}-{count}.json"
    if not kept.exists():
        ids = write_conversations(
            generation_runner(opened.model, model, WINDOW_LEN, 2),
            opened.tokenizer,
            opened.template,
            num_conversations=count,
            length=WINDOW_LEN,
            seed=seed,
            on_progress=lambda done, total: None,
        )
        kept.write_text(json.dumps(ids.tolist()))
    return torch.tensor(json.loads(kept.read_text()))


def texts(opened: OpenModel, arguments: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Name -> int64 [S, WINDOW_LEN]."""
    result = {}
    if arguments.own:
        result["own"] = conversations(
            opened, arguments.model, arguments.work, arguments.own, EVALUATION_SEED
        )
    for entry in arguments.text:
        name, _, path = entry.partition("=")
        windows = windows_of(opened.tokenizer.encode(file_text(Path(path))), WINDOW_LEN)
        result[name] = windows[: arguments.windows]
    return result


# --- likelihoods ----------------------------------------------------------------------------------


def plain_nll(model: TrainableDecoder, windows: torch.Tensor) -> list[float]:
    """Negative log-likelihood of each window, nats summed over its tokens but the first."""
    result: list[float] = []
    with torch.inference_mode():
        for ids in windows.split(WINDOWS_AT_ONCE):
            logits = model.logits(model.hidden(ids[:, :-1]))
            losses = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
            )
            result += losses.view(len(ids), -1).double().sum(1).tolist()
    return result


def runner_nll(runner: ModelRunner, windows: torch.Tensor) -> list[float]:
    """The same by the engine's own model."""
    return [sum(float(part.double().sum()) for part in surprisals(runner, ids)) for ids in windows]


class Kept:
    """Results in a file, written after each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.results: Results = json.loads(path.read_text()) if path.exists() else {}

    def measure(
        self, variant: str, windows: Windows, make: Callable[[], Callable[..., list[float]]]
    ) -> None:
        """``make`` is called only for texts that were not measured."""
        left = {n: w for n, w in windows.items() if n not in self.results.get(variant, {})}
        if not left:
            return
        started_s = time.monotonic()
        nll = make()
        made_s = time.monotonic()
        for name, text in left.items():
            self.results.setdefault(variant, {})[name] = nll(text)
            self._path.write_text(json.dumps(self.results))
        print(
            f"{variant}: {made_s - started_s:.0f} s, {time.monotonic() - made_s:.0f} s", flush=True
        )


# --- what is compared -----------------------------------------------------------------------------


def _int8(values: torch.Tensor) -> torch.Tensor:
    codes, scale = quantize_int8(values)
    return codes.float() * scale.unsqueeze(1)


def _float8(values: torch.Tensor) -> torch.Tensor:
    codes, scale = quantize_float8(values)
    return codes.float() * scale.unsqueeze(1)


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bfloat16": lambda values: values.bfloat16().float(),
    "int8": _int8,
    "int8 g32": lambda values: round_to_nearest(values, GridSpec(8, 32, True)).values(),
    "fp8": _float8,
}
LAYER_PARTS = ("query", "key", "value", "attention_output", "gate", "up", "down")


def with_form(model: TrainableDecoder, form: str) -> TrainableDecoder:
    """Changes the matrices; "+head": the embedding and the head as well. "int8 of X": only X."""
    name, _, part = form.removesuffix("+head").partition(" of ")
    if name in FORMS:
        parts = [part] if part else LAYER_PARTS
    else:
        name, parts = form.removesuffix("+head"), list(LAYER_PARTS)
    for layer in model.layers:
        for key in parts:
            layer.weights[key] = FORMS[name](layer.weights[key])
    if form.endswith("+head"):
        for key in ("embedding", "head"):
            if key in model.shared:
                model.shared[key] = FORMS[name](model.shared[key])
    return model


def plain(opened: OpenModel) -> TrainableDecoder:
    return TrainableDecoder(opened.model.config, opened.model.weights, WINDOW_LEN)


def runner(opened: OpenModel, model: str, weight_format: str) -> ModelRunner:
    config = EngineConfig(
        model_path=model,
        num_threads=torch.get_num_threads(),
        max_sequences=1,
        max_context=WINDOW_LEN,
        backend="native" if weight_format == "native" else "torch",
    )
    name = "auto" if weight_format == "native" else weight_format
    return ModelRunner.of(opened.model, config, weight_format=name)


def calibrated(
    opened: OpenModel, arguments: argparse.Namespace, recipe: LayerRecipe, seed: int
) -> TrainableDecoder:
    """The model with its layers' matrices rounded; kept in the work directory, since it takes
    minutes."""
    spec = recipe.spec
    kept = arguments.work / (
        f"{recipe.method}-{spec.bits}-{spec.group}-{spec.is_symmetric}-{recipe.clips}-{seed}"
        ".safetensors"
    )
    if not kept.exists():
        calibration = conversations(
            opened, arguments.model, arguments.work, NUM_CALIBRATION_WINDOWS, seed
        )
        changed = plain(opened)
        quantize_layers(changed, calibration, recipe, lambda done, total: None)
        write_safetensors(kept, changed.named_weights())
    with SafetensorsFile(kept) as file:
        weights = {name: file.read(name) for name in file.tensors}
    return TrainableDecoder(opened.model.config, weights, WINDOW_LEN)


CALIBRATED = {
    "int8, gptq": LayerRecipe("gptq", GridSpec(8, 1536, True), clips=False),
}


def compare_formats(
    opened: OpenModel, arguments: argparse.Namespace, windows: Windows, kept: Kept
) -> None:
    forms = ["bfloat16+head", "int8", "int8 g32", "int8, gptq", "fp8", "w8a8", "native"]
    for form in arguments.only or forms:
        if form in CALIBRATED:

            def make(form: str = form) -> Callable[..., list[float]]:
                changed = calibrated(opened, arguments, CALIBRATED[form], arguments.seeds[0])
                return lambda text: plain_nll(changed, text)
        elif form in ("w8a8", "native"):

            def make(form: str = form) -> Callable[..., list[float]]:
                engine = runner(opened, arguments.model, form)
                return lambda text: runner_nll(engine, text)
        else:

            def make(form: str = form) -> Callable[..., list[float]]:
                changed = with_form(plain(opened), form)
                return lambda text: plain_nll(changed, text)

        kept.measure(form, windows, make)


def method_variants(seeds: list[int]) -> Iterator[tuple[str, LayerRecipe, int]]:
    """(name, recipe, seed of the calibration), the most wanted first. 128 divides no 576: AWQ has
    no form for a last group that is shorter."""
    blind: LayerMethod = "rtn"
    for group in (64, 128):
        yield f"rtn g{group}", LayerRecipe(blind, GridSpec(4, group), clips=False), seeds[0]
    for clips in (True, False):
        for seed in seeds:
            methods: list[tuple[LayerMethod, int]] = [("awq", 64), ("gptq", 64), ("gptq", 128)]
            for method, group in methods + ([("rtn", 64), ("rtn", 128)] if clips else []):
                name = f"{method} g{group}{' narrowed' if clips else ''} #{seed}"
                yield name, LayerRecipe(method, GridSpec(4, group), clips=clips), seed


def compare_methods(
    opened: OpenModel, arguments: argparse.Namespace, windows: Windows, kept: Kept
) -> None:
    for name, recipe, seed in method_variants(arguments.seeds):
        if arguments.only and not any(name.startswith(wanted) for wanted in arguments.only):
            continue

        def make(recipe: LayerRecipe = recipe, seed: int = seed) -> Callable[..., list[float]]:
            changed = calibrated(opened, arguments, recipe, seed)
            return lambda text: plain_nll(changed, text)

        kept.measure(name, windows, make)


# --- what is printed ------------------------------------------------------------------------------


def change(reference: list[float], other: list[float]) -> tuple[float, float]:
    """(relative change of the perplexity, its standard error) from windows' NLLs."""
    num_tokens = WINDOW_LEN - 1
    differences = [(b - a) / num_tokens for a, b in zip(reference, other, strict=True)]
    ratio = math.exp(statistics.fmean(differences))
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return ratio - 1, ratio * error


def print_table(results: Results) -> None:
    reference = results["float32"]
    names = list(reference)
    for name in names:
        nll = reference[name]
        perplexity = math.exp(sum(nll) / len(nll) / (WINDOW_LEN - 1))
        print(f"{name}: {len(nll) * (WINDOW_LEN - 1):,} tokens, float32 {perplexity:.3f}")
    for variant, by_text in results.items():
        if variant == "float32":
            continue
        cells = []
        for name in (n for n in names if n in by_text):
            ratio, error = change(reference[name], by_text[name])
            cells.append(f"{name} {ratio:+.2%} ± {error:.2%}")
        print(f"{variant:24}", "; ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("work", type=Path)
    parser.add_argument("what", choices=("formats", "methods", "table"))
    parser.add_argument("--own", type=int, default=0)
    parser.add_argument("--text", action="append", default=[])
    parser.add_argument("--windows", type=int, help="of each file, at most")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(exist_ok=True, parents=True)
    kept = Kept(arguments.work / "results.json")
    if arguments.what != "table":
        with open_model(arguments.model) as opened:
            windows = texts(opened, arguments)
            torch.set_num_threads(arguments.threads)

            def exact() -> Callable[..., list[float]]:
                model = plain(opened)
                return lambda text: plain_nll(model, text)

            kept.measure("float32", windows, exact)
            if arguments.what == "formats":
                compare_formats(opened, arguments, windows, kept)
            else:
                compare_methods(opened, arguments, windows, kept)
    print_table(kept.results)


if __name__ == "__main__":
    main()
