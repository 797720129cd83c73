"""`parley train-eagle`: a head that drafts for a model, trained on what the model itself says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, cast, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from app.cli.models import HomeOption
from app.cli.quantize import ModelArgument, OutOption, ThreadsOption, read_text, reported, resolve
from app.config import load_settings
from llm_core import HeadKind, HeadProgress, TrainHeadOptions, train_head

_STAGES = {
    "talk": "the model talks",
    "features": "its hidden states",
    "start": "regression",
}


def train_eagle(
    model: ModelArgument,
    out: OutOption,
    kind: Annotated[str, typer.Option(help="eagle3, eagle1 or medusa.")] = "eagle3",
    talk_minutes: Annotated[
        float, typer.Option(help="How long the model talks, to have more to learn from.", min=0)
    ] = 25.0,
    train_minutes: Annotated[
        float,
        typer.Option(help="How long to train; what an interrupted run did is counted.", min=0),
    ] = 35.0,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Directory for what the model says and the training's state; a later run goes "
            "on from there. Default: train in the home directory.",
            file_okay=False,
        ),
    ] = None,
    draft_vocab: Annotated[
        int, typer.Option(help="Words that can be drafted, the commonest; 0: all.", min=0)
    ] = 3072,
    text: Annotated[
        Path | None,
        typer.Option("--text", help="Text whose sentences' beginnings begin questions, too."),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a head of the same model to begin with, its words included.",
            file_okay=False,
        ),
    ] = None,
    threads: ThreadsOption = 2,
    seed: Annotated[int, typer.Option(help="Of text and order.", min=0)] = 0,
    home: HomeOption = None,
) -> None:
    """Train a head that drafts tokens for a model (EAGLE-3, EAGLE-1, Medusa). No data is needed."""
    with reported(), _bars() as (progress, on_training):
        options = TrainHeadOptions(
            model_path=resolve(model, home),
            out_dir=out,
            data_dir=data or load_settings(home=home).home / "train",
            kind=_kind(kind),
            talk_s=60 * talk_minutes,
            train_s=60 * train_minutes,
            draft_vocab=draft_vocab,
            text=read_text(text),
            start_dir=start,
            num_threads=threads,
            seed=seed,
        )
        report = train_head(options, progress, on_training)
    greedy, sampled = report.chain_lens
    say = Console(soft_wrap=True, highlight=False).print
    say(f"data        {report.num_answer_tokens:,} tokens of answers")
    say(f"training    {report.num_steps:,} steps, {report.num_anchors:,} rows")
    say(f"chain of 4  {greedy:.2f} tokens a step on held-out answers at temperatures 0 and 0.2,")
    say(f"            {sampled:.2f} at 0.7 and 1.0")
    say(
        f"written     {out} ({report.size_bytes / 1e6:.1f} MB, {report.wall_s:.0f} s)", markup=False
    )


def _kind(name: str) -> HeadKind:
    known = get_args(HeadKind)
    if name not in known:
        raise typer.BadParameter(
            f"{name!r} is not known; known are {', '.join(known)}", param_hint="--kind"
        )
    return cast(HeadKind, name)


@contextmanager
def _bars() -> Iterator[tuple[Callable[[str, int, int], None], Callable[[HeadProgress], None]]]:
    """A bar for each stage, on standard error; the training's shows what a chain would bring."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
    ) as bars:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(_STAGES[stage], total=total, note="")
            bars.update(tasks[stage], completed=done, total=total)

        def show_training(at: HeadProgress) -> None:
            note = (
                f"loss {at.loss:.2f}, first draft right {at.acceptance[0]:.0%}, "
                f"chain {at.chain_len:.2f}"
            )
            if "training" not in tasks:
                tasks["training"] = bars.add_task("training", total=1.0, note=note)
            bars.update(tasks["training"], completed=at.done, note=note)
            if at.held_out is not None:
                greedy, sampled = at.held_out
                bars.console.print(
                    f"step {at.step}: {greedy:.3f} tokens a step on held-out near-greedy answers, "
                    f"{sampled:.3f} on others; {at.num_anchors:,} rows in {at.elapsed_s:.0f} s"
                )

        yield show, show_training
