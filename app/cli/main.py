"""The ``parley`` command. Exit codes: 0 done, 1 it failed, 2 it was asked the wrong way.

The commands import what they need when they run. torch, the speech runtimes and the web framework
take seconds to load, and ``parley --help`` or a mistyped option should not wait for them.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from app import __version__
from app.cli.bench import bench_app
from app.cli.config import config
from app.cli.models import HomeOption, configured_models, fetch_models, models_app
from app.cli.quantize import distill, quantize, shorten
from app.cli.traces import traces_app
from app.cli.train import train_eagle
from app.errors import ConfigError, ParleyError
from app.models import ModelStore

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
MAX_SEED = 2**64 - 1
MAX_THREADS = 256
# "You are Parley" makes a small model speak French: the name must not come first.
DEFAULT_SYSTEM = "You are a helpful AI assistant named Parley."


class Provider(StrEnum):
    """Phone providers whose protocols ``parley call`` speaks."""

    twilio = "twilio"
    telnyx = "telnyx"
    plivo = "plivo"
    exotel = "exotel"
    vonage = "vonage"
    audiosocket = "audiosocket"


_Timeout = Annotated[
    float,
    typer.Option(
        help="Give up when the server is silent for so many seconds after the recording.",
        min=0.5,
        max=3600,
    ),
]

cli = typer.Typer(
    name="parley",
    help="A voice assistant that runs on your own machine.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    # A traceback is for developers, and its local variables may hold keys and conversations.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cli.add_typer(models_app, name="models")
cli.add_typer(bench_app, name="bench")
cli.add_typer(traces_app, name="traces")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"parley {__version__}")
        raise typer.Exit


@cli.callback()
def options(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    """A voice assistant that runs on your own machine."""


@cli.command()
def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. [dim]PARLEY_HOST, else 127.0.0.1[/]")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            help="Port; 0 lets the system choose. [dim]PARLEY_PORT, else 8080[/]", min=0, max=65535
        ),
    ] = None,
    home: HomeOption = None,
    log_level: Annotated[
        str | None,
        typer.Option(help="debug, info, warning or error. [dim]PARLEY_LOG_LEVEL, else info[/]"),
    ] = None,
) -> None:
    """Start the server. Every setting is also an environment variable [bold]PARLEY_...[/]."""
    from app.config import load_settings

    settings = load_settings(host=host, port=port, home=home, log_level=log_level)
    # After the settings, so that a mistake in them is told at once.
    from app.server.lifecycle import serve as run_server

    # Before the server's log begins, so that a first start shows its downloads in peace.
    fetch_models(ModelStore(settings.home), configured_models(settings), Console(stderr=True))
    run_server(settings)


@cli.command()
def talk(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Recordings of a caller: WAV, FLAC, Ogg, .ulaw or .alaw.",
            exists=True,
            dir_okay=False,
            readable=True,
        ),
    ],
    url: Annotated[
        str | None,
        typer.Option(help="A running server, http(s):// or ws(s)://. Without it one is started."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key for the server.", envvar="PARLEY_API_KEY", show_envvar=True),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Where to write the reply; a folder when there are several recordings. "
            "[dim]default: NAME.reply.wav here; nothing with --json[/]",
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Write both sides as one stereo file, caller left; a folder when there are "
            "several recordings."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a recording, and nothing else.")
    ] = False,
    same_conversation: Annotated[
        bool,
        typer.Option(
            "--same-conversation",
            help="Say all recordings in one conversation instead of one each.",
        ),
    ] = False,
    timeout: _Timeout = 15.0,
    home: HomeOption = None,
) -> None:
    """Say recordings to Parley at speaking pace, and show what it heard, said, and took.

    The audio goes through the real pipeline over a real connection, followed by silence as from a
    live microphone, until the reply is complete. A pause in a recording may make several turns of
    it: all of them are collected, and the stages shown are those of the last.
    """
    from app.cli.talk import TalkOptions, run_talk

    options = TalkOptions(
        files=files,
        url=url,
        api_key=api_key,
        out=out,
        record=record,
        as_json=as_json,
        same_conversation=same_conversation,
        timeout_s=timeout,
        home=home,
    )
    if not run_talk(options):
        raise typer.Exit(EXIT_FAILED)


@cli.command()
def call(
    file: Annotated[
        Path,
        typer.Argument(
            help="Recording of a caller: WAV, FLAC, Ogg, .ulaw or .alaw.",
            exists=True,
            dir_okay=False,
            readable=True,
        ),
    ],
    provider: Annotated[
        Provider, typer.Option(help="Whose protocol to speak; audiosocket is Asterisk's.")
    ] = Provider.twilio,
    url: Annotated[
        str | None,
        typer.Option(help="A running server, http(s):// or ws(s)://. Without it one is started."),
    ] = None,
    audiosocket_port: Annotated[
        int | None,
        typer.Option(help="With --url and audiosocket: its PARLEY_AUDIOSOCKET_PORT.", min=1),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key for the server.", envvar="PARLEY_API_KEY", show_envvar=True),
    ] = None,
    keys: Annotated[str, typer.Option(help="Keys to press when the greeting is over.")] = "",
    loss: Annotated[
        float, typer.Option(help="Share of the caller's frames that are lost.", min=0, max=0.9)
    ] = 0.0,
    late: Annotated[
        float, typer.Option(help="Frames are late by up to so many ms.", min=0, max=5000)
    ] = 0.0,
    shuffle: Annotated[
        bool, typer.Option("--shuffle", help="Some frames overtake others.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Where to write the reply. [dim]default: NAME.reply.wav; nothing with --json[/]",
        ),
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Write both sides as one stereo file, caller left.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and nothing else.")
    ] = False,
    timeout: _Timeout = 15.0,
    home: HomeOption = None,
) -> None:
    """Phone Parley as a provider would, say a recording, and show what it heard, said, and took."""
    from app.cli.call import CallOptions, run_call
    from app.cli.talk import TalkOptions

    wrong = [key for key in keys if key not in "0123456789*#ABCD"]
    if wrong:
        raise typer.BadParameter(f"--keys: {wrong[0]!r} is not on a phone")
    talk_options = TalkOptions(
        files=[file],
        url=url,
        api_key=api_key,
        out=out,
        record=record,
        as_json=as_json,
        timeout_s=timeout,
        home=home,
    )
    options = CallOptions(
        provider.value,
        keys=keys,
        loss=loss,
        late_ms=late,
        is_shuffled=shuffle,
        audiosocket_port=audiosocket_port,
    )
    if not run_call(talk_options, options):
        raise typer.Exit(EXIT_FAILED)


@cli.command()
def chat(
    prompt: Annotated[
        str | None,
        typer.Argument(help="Answer this and exit. Without it: a conversation, or standard input."),
    ] = None,
    system: Annotated[
        str,
        typer.Option(
            help=f'Instructions to the model; "" for none. [dim]default: {DEFAULT_SYSTEM}[/]',
            show_default=False,
        ),
    ] = DEFAULT_SYSTEM,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 is always the likeliest word. [dim]PARLEY_TEMPERATURE[/]", min=0, max=2
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Longest answer. [dim]PARLEY_MAX_REPLY_TOKENS[/]", min=1, max=100_000),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Makes an answer repeatable: 64 bits.", min=0, max=MAX_SEED),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Another model by name or path. [dim]PARLEY_LLM_MODEL[/]")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Threads to compute with. [dim]PARLEY_LLM_THREADS[/]", min=1, max=MAX_THREADS
        ),
    ] = None,
    home: HomeOption = None,
) -> None:
    """Talk to the language model by typing. Ctrl-C stops an answer; /exit or Ctrl-D leaves."""
    if prompt is None and not sys.stdin.isatty():
        prompt = _read_stdin().strip()
    if prompt is not None and not prompt.strip():
        raise typer.BadParameter("there is nothing to answer: the prompt is empty")
    for name, text in (("the prompt", prompt), ("--system", system)):
        if text is not None and not _is_unicode(text):
            raise typer.BadParameter(f"{name} is not text in UTF-8")
    # After the checks, so that a mistake is told at once.
    from app.cli.chat import ChatOptions, run_chat

    run_chat(
        ChatOptions(
            prompt=prompt,
            system=system,
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
            model=model,
            threads=threads,
            home=home,
        )
    )


def _read_stdin() -> str:
    try:
        # UTF-8 whatever the locale is: what is piped in comes from a file more often than not.
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter("standard input is not text in UTF-8") from error


def _is_unicode(text: str) -> bool:
    """False for an argument with bytes that Python could not decode and smuggled in."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# Help lists commands in this order: what everybody needs stands above.
cli.command()(shorten)
cli.command()(quantize)
cli.command()(distill)
cli.command()(train_eagle)
cli.command()(config)


@cli.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"parley {__version__}")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits with its code."""
    try:
        cli(arguments, prog_name="parley")
    except ConfigError as error:
        _complain(error)
        sys.exit(EXIT_USAGE)
    except ParleyError as error:
        _complain(error)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would complain once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)


def _complain(error: ParleyError) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text.assemble(("parley: ", "bold red"), error.message))
