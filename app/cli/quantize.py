"""`parley quantize`, `distill`, `shorten` and `bench perplexity`: a model at work on its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, cast, get_args

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from app.cli.models import HomeOption
from app.config import load_settings
from app.errors import ParleyError
from app.models import ModelStore
from llm_core import (
    DistillOptions,
    LlmError,
    PerplexityOptions,
    PerplexityReport,
    QuantizeMethod,
    QuantizeOptions,
    ShortenOptions,
    distill_model,
    measure_perplexity,
    quantize_model,
    shorten_text,
)
from llm_core import Progress as OnProgress

_MAX_TEXT_BYTES = 1 << 28
_STAGES = {
    "text": "writing text to work with",
    "before": "perplexity before",
    "layers": "quantising layers",
    "after": "perplexity after",
    "perplexity": "reading the text",
    "training": "training",
    "shorten": "reading the text",
}

ModelArgument = Annotated[
    str, typer.Argument(help="A name, hf:org/name, a .gguf file or a Hugging Face directory.")
]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Directory to make.", file_okay=False)]
TextOption = Annotated[
    Path | None,
    typer.Option(
        "--text", help="Text to work with; without it the model writes conversations of its own."
    ),
]
ThreadsOption = Annotated[int, typer.Option(help="Threads to compute with.", min=1, max=256)]


def quantize(
    model: ModelArgument,
    out: OutOption,
    method: Annotated[str, typer.Option(help="gptq, awq, rtn, int8 or fp8.")] = "gptq",
    bits: Annotated[int, typer.Option(help="4 or 8, for gptq and rtn; awq has 4.")] = 4,
    group: Annotated[
        int | None,
        typer.Option(
            help="Inputs that share a scale; -1: all. Default: the largest of 128, 64 and 32 that "
            "divides the model's matrices, as most readers of the files need; for int8, 32."
        ),
    ] = None,
    act_order: Annotated[
        bool, typer.Option(help="gptq: the inputs with the largest energy first.")
    ] = True,
    symmetric: Annotated[
        bool, typer.Option("--symmetric", help="No zero points, as some GPU kernels need it.")
    ] = False,
    text: TextOption = None,
    eval_text: Annotated[
        Path | None,
        typer.Option(help="Text to measure with; else a part of the other one is kept for it."),
    ] = None,
    windows: Annotated[int, typer.Option(help="Pieces of text to calibrate with.", min=2)] = 64,
    window_len: Annotated[int, typer.Option(help="Tokens of each.", min=8)] = 256,
    threads: ThreadsOption = 2,
    seed: Annotated[int, typer.Option(help="Of the text that the model writes.", min=0)] = 0,
    home: HomeOption = None,
) -> None:
    """Write a quantised copy of a model (GPTQ, AWQ or compressed-tensors), and measure both."""
    with reported(), _bars() as progress:
        options = QuantizeOptions(
            model_path=resolve(model, home),
            out_dir=out,
            method=_method(method),
            bits=bits,
            group=group,
            act_order=act_order,
            is_symmetric=symmetric,
            text=read_text(text),
            eval_text=read_text(eval_text),
            num_windows=windows,
            window_len=window_len,
            num_threads=threads,
            seed=seed,
        )
        report = quantize_model(options, progress)
    _say(f"source      {report.source_note}")
    change = report.perplexity_after / report.perplexity_before - 1
    _say(f"perplexity  {report.perplexity_before:.3f} before, {report.perplexity_after:.3f} after")
    _say(f"            ({change:+.2%}, {report.num_eval_tokens:,} tokens)")
    _say(f"written     {out} ({report.size_bytes / 1e6:.1f} MB, {report.wall_s:.0f} s)")


def distill(
    model: ModelArgument,
    out: OutOption,
    layers: Annotated[int, typer.Option(help="Layers that the student keeps.", min=1)],
    steps: Annotated[int, typer.Option(help="Batches to train on.", min=1)] = 100,
    batch: Annotated[int, typer.Option(help="Pieces of text in a batch.", min=1)] = 4,
    learning_rate: Annotated[float, typer.Option(help="The largest, after the warm-up.")] = 5e-4,
    text: TextOption = None,
    windows: Annotated[int, typer.Option(help="Pieces of text to train on.", min=2)] = 128,
    window_len: Annotated[int, typer.Option(help="Tokens of each.", min=8)] = 128,
    threads: ThreadsOption = 2,
    seed: Annotated[int, typer.Option(help="Of text and order.", min=0)] = 0,
    home: HomeOption = None,
) -> None:
    """Make a model of fewer layers and train it to say what the whole one would."""
    with reported(), _bars() as progress:
        options = DistillOptions(
            model_path=resolve(model, home),
            out_dir=out,
            num_layers=layers,
            num_steps=steps,
            batch_size=batch,
            learning_rate=learning_rate,
            text=read_text(text),
            num_windows=windows,
            window_len=window_len,
            num_threads=threads,
            seed=seed,
        )
        report = distill_model(options, progress)
    _say(f"layers      {', '.join(map(str, report.kept_layers))} of the teacher's")
    for name, figures in (("untrained", report.before), ("trained", report.after)):
        _say(
            f"{name:11} divergence {figures.divergence:.3f} nats, "
            f"same best token {figures.same_best_token:.1%}, perplexity {figures.perplexity:.2f}"
        )
    _say(f"teacher     perplexity {report.teacher_perplexity:.2f}")
    _say(f"written     {out} ({report.size_bytes / 1e6:.1f} MB, {report.wall_s:.0f} s)")


def shorten(
    text: Annotated[Path, typer.Argument(help="Text for a prompt: notes, a manual, a history.")],
    max_tokens: Annotated[int, typer.Option(help="Tokens that it may have.", min=1)],
    question: Annotated[
        str, typer.Option(help="Keep what bears on this; else what the model expects least.")
    ] = "",
    model: Annotated[str | None, typer.Option(help="As PARLEY_LLM_MODEL.")] = None,
    threads: ThreadsOption = 2,
    home: HomeOption = None,
) -> None:
    """Leave sentences out of a text, so that prompts with it are read sooner."""
    with reported(), _bars() as progress:
        content = read_text(text)
        assert content is not None, "a path was given"
        options = ShortenOptions(
            model_path=resolve(model, home),
            text=content,
            max_tokens=max_tokens,
            question=question,
            num_threads=threads,
        )
        report = shorten_text(options, progress)
    sys.stdout.write(report.text + "\n")
    Console(stderr=True, highlight=False).print(
        f"{report.tokens_before:,} tokens before, {report.tokens_after:,} after "
        f"({report.wall_s:.1f} s)"
    )


def perplexity(
    *, model: str | None, text: Path, options: dict[str, int | str], home: Path | None
) -> PerplexityReport:
    """For `parley bench perplexity`: ``options`` are fields of ``PerplexityOptions``."""
    with reported(), _bars() as progress:
        content = read_text(text)
        assert content is not None, "a path was given"
        return measure_perplexity(
            PerplexityOptions(model_path=resolve(model, home), text=content, **options),  # type: ignore[arg-type]
            progress,
        )


def _method(name: str) -> QuantizeMethod:
    known = get_args(QuantizeMethod)
    if name not in known:
        raise typer.BadParameter(
            f"{name!r} is not known; known are {', '.join(known)}", param_hint="--method"
        )
    return cast(QuantizeMethod, name)


def resolve(model: str | None, home: Path | None) -> Path:
    """The local file or directory of a model (None: the configured one). Raises ParleyError."""
    settings = load_settings(home=home, llm_model=model)
    return ModelStore(settings.home).resolve(settings.llm_model)


def read_text(path: Path | None) -> str | None:
    """The file's content; None for none. Raises ParleyError."""
    if path is None:
        return None
    try:
        if path.stat().st_size > _MAX_TEXT_BYTES:
            raise ParleyError(f"{path}: larger than {_MAX_TEXT_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ParleyError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ParleyError(f"{path}: is not text in UTF-8") from error


@contextmanager
def reported() -> Iterator[None]:
    """The core's errors as the command line's own."""
    try:
        yield
    except LlmError as error:
        raise ParleyError(str(error)) from error


@contextmanager
def _bars() -> Iterator[OnProgress]:
    """A bar for each stage, on standard error."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as bars:
        tasks = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(_STAGES[stage], total=total)
            bars.update(tasks[stage], completed=done)

        yield show


def _say(text: str) -> None:
    Console(soft_wrap=True, highlight=False).print(text, markup=False)
