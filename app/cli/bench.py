"""`parley bench`: figures of this machine, for people or as JSON.

What is measured is imported when it is chosen, as in ``app.cli.main``.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from app.cli.gate import gate
from app.cli.models import HomeOption
from app.cli.quantize import perplexity
from app.cli.replay import replay
from app.config import load_settings
from app.errors import ParleyError
from app.models import ModelStore
from llm_core import LlmError

if TYPE_CHECKING:
    from bench.llm import compare

bench_app = typer.Typer(help="Measure this machine.", no_args_is_help=True)
bench_app.command()(replay)
bench_app.command()(gate)

# Units in the figures' names, and whether more is better; for the table alone.
_DESCRIPTIONS = {
    "decode_tok_s": "decode, 1 stream, tokens/s",
    "spoken_tok_s": "decode, 1 stream, a caller's question, tokens/s",
    "prefill_tok_s": "prefill of 512 words, tokens/s",
    "ttft_cold_ms": "first token, 600-word system prompt cold, ms",
    "ttft_cached_ms": "first token, the same system prompt warm, ms",
    "cached_tokens": "prompt tokens taken from the cache",
    "long_prompt_tokens": "long prompt beside 4 streams: its tokens",
    "long_prompt_ttft_ms": "long prompt: its first token, ms",
    "long_prompt_max_gap_ms": "long prompt: longest gap of the 4 streams, ms",
    "long_prompt_gap_ratio": "long prompt: that gap by the median gap",
}


@bench_app.command("llm")
def bench_llm(
    model: Annotated[
        str | None,
        typer.Option(help="Model name or file. [dim]PARLEY_LLM_MODEL, else the embedded one[/]"),
    ] = None,
    threads: Annotated[int, typer.Option(help="Compute threads of each engine.", min=1)] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds; the median counts.", min=1)] = 5,
    streams: Annotated[str, typer.Option(help="Numbers of simultaneous streams.")] = "8,32",
    peer: Annotated[
        str | None, typer.Option(help="Compare with this engine in the same run: llama.cpp.")
    ] = None,
    streams_only: Annotated[
        bool, typer.Option("--streams-only", help="One stream and many, and nothing else.")
    ] = False,
    speculation: Annotated[
        str | None,
        typer.Option(help="Also our engine with drafts: auto, ngram, or a head's or model's path."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and nothing else.")
    ] = False,
    home: HomeOption = None,
) -> None:
    """Decode, prefill, warm prefix, many streams; beside a peer on the same file and threads."""
    if peer not in (None, "llama.cpp"):
        raise typer.BadParameter(f"{peer!r} is not known; known is llama.cpp", param_hint="--peer")
    from bench.llm import compare

    settings = load_settings(home=home, llm_model=model)
    options = compare.LlmBenchOptions(
        model_path=ModelStore(settings.home).resolve(settings.llm_model),
        num_threads=threads,
        num_rounds=rounds,
        stream_counts=_counts(streams),
        peer=peer is not None,
        speculation=speculation,
        is_streams_only=streams_only,
    )
    log = Console(stderr=True)
    try:
        result = asyncio.run(compare.run(options, lambda text: log.print(text, style="dim")))
    except LlmError as error:
        raise ParleyError(str(error)) from error
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        Console().print(_table(result))


@bench_app.command("perplexity")
def bench_perplexity(
    text: Annotated[Path, typer.Option(help="The text to read, in UTF-8.")],
    model: Annotated[
        str | None,
        typer.Option(help="Model name or file. [dim]PARLEY_LLM_MODEL, else the embedded one[/]"),
    ] = None,
    window_len: Annotated[int, typer.Option(help="Tokens that are read together.", min=2)] = 512,
    max_tokens: Annotated[int, typer.Option(help="Longest text, in tokens.", min=2)] = 1 << 16,
    weight_format: Annotated[
        str, typer.Option(help="float32: the weights alone; auto: what the engine would run.")
    ] = "float32",
    threads: Annotated[int, typer.Option(help="Compute threads.", min=1, max=256)] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    home: HomeOption = None,
) -> None:
    """Perplexity of a text: how well a model, or a quantised copy of it, foresees the next word."""
    options: dict[str, int | str] = {
        "window_len": window_len,
        "max_tokens": max_tokens,
        "weight_format": weight_format,
        "num_threads": threads,
    }
    report = perplexity(model=model, text=text, options=options, home=home)
    if as_json:
        typer.echo(json.dumps(asdict(report)))
    else:
        Console(highlight=False).print(
            f"perplexity {report.perplexity:.3f} over {report.num_tokens:,} tokens "
            f"(windows of {window_len}, {report.weight_format})"
        )


@bench_app.command("voice")
def bench_voice(
    callers: Annotated[int, typer.Option(help="Callers at once.", min=1, max=256)] = 1,
    turns: Annotated[int, typer.Option(help="Utterances of each caller.", min=1, max=1000)] = 8,
    url: Annotated[str | None, typer.Option(help="A running server; else one is started.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="PARLEY_API_KEY", help="Key for a server that asks for one")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Folder for recordings of both sides.", file_okay=False, writable=True),
    ] = None,
    provider: Annotated[
        str | None,
        typer.Option(
            help="They call by phone: twilio, telnyx, plivo, exotel, vonage, audiosocket."
        ),
    ] = None,
    audiosocket_port: Annotated[
        int | None,
        typer.Option(help="With --url and audiosocket: its PARLEY_AUDIOSOCKET_PORT.", min=1),
    ] = None,
    speech: Annotated[
        Path | None,
        typer.Option(
            help="Folder of recordings to say instead of the script: WAV, FLAC or Ogg, a turn each,"
            " with NAME.txt beside them where the words are known.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    home: HomeOption = None,
) -> None:
    """Callers speak over real sockets at speaking pace; both sides are recorded and measured."""
    from bench.voice import callers as voice

    if provider is not None and provider not in voice.PROVIDERS:
        raise typer.BadParameter(
            f"{provider!r}: one of {', '.join(voice.PROVIDERS)}", param_hint="--provider"
        )
    if record is not None:
        try:
            record.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"{record} cannot be made: {error.strerror}"
            raise typer.BadParameter(why, param_hint="--record") from error
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    options = voice.VoiceOptions(
        callers=callers,
        turns=turns,
        url=url,
        api_key=api_key,
        home=home,
        record=record,
        provider=provider,
        audiosocket_port=audiosocket_port,
        speech=speech,
    )
    figures = voice.run(options, lambda note: notes.print(note, style="dim", markup=False))
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        _show_voice(figures, Console(highlight=False))


def _show_voice(figures: dict[str, Any], console: Console) -> None:
    for name, value in figures.items():
        if name == "waited_for_ms":
            if value:
                console.print(_waits_table(value))
        else:
            console.print(f"{name.replace('_', ' '):24} {_text(value)}", markup=False)


def _waits_table(waited_for_ms: dict[str, dict[str, float]]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("waited for, ms", min_width=24)
    for title in ("p50", "p95", "in the answer at p95"):
        table.add_column(title, justify="right")
    for part, spread in waited_for_ms.items():
        cells = [f"{spread[name]:,.0f}" for name in ("p50", "p95", "p95_answer")]
        table.add_row(part.replace("_", " "), *cells)
    return table


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name} {_text(part)}" for name, part in value.items()) or "none"
    if value is None:
        return "unknown"
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        counts = (0,)
    if any(not 1 <= count <= 256 for count in counts):
        raise typer.BadParameter(
            f"{text!r}: numbers from 1 to 256, with commas between them", param_hint="--streams"
        )
    return counts


def _table(result: compare.LlmBenchResult) -> Table:
    facts = result.machine
    table = Table(
        title=f"{result.model['name']} ({result.model['weight_format']}), "
        f"{result.options.num_threads} threads, median of {result.options.num_rounds} rounds",
        caption=f"{facts['processor']}, {facts['num_cores']} cores, memory read "
        f"{facts['read_gb_s']} GB/s, load {facts['load_average']} at the start",
    )
    table.add_column("")
    engines = result.rounds.sides
    for name in engines:
        table.add_column(name, justify="right")
    medians = [result.rounds.medians(name) for name in engines]
    ratios = result.rounds.ratios(engines[0], engines[1]) if len(engines) == 2 else {}
    if ratios:
        table.add_column("ratio", justify="right")
    for figure in medians[0]:
        cells = [f"{values[figure]:,.1f}" for values in medians]
        if ratios:
            cells.append(f"{ratios[figure]:.2f}" if figure in ratios else "")
        table.add_row(_DESCRIPTIONS.get(figure, figure.replace("_", " ")), *cells)
    return table
