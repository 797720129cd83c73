"""Logs of the engine's processes, in the lines of the program that started them.

The engine and its ranks write to the standard error that they inherit. Whoever collects that as one
stream must be able to read every line of it the same way, so the format goes with the level.

    2026-01-31T12:00:00.123Z info llm_core.model.backend process=engine[4711] the model runs in ...
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

import msgspec

from llm_core.messages import LogFormat


def log_arguments(logger: logging.Logger, log_format: LogFormat) -> list[str]:
    """What a new process is told of logs: the level of ``logger``, and the form of lines."""
    level = logging.getLevelName(logger.getEffectiveLevel())
    return ["--log-level", level, "--log-format", log_format]


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log-level", default="INFO", help="Python logging level")
    parser.add_argument("--log-format", default="text", choices=("text", "json"))


def start_logging(arguments: argparse.Namespace, process: str) -> None:
    """Log to standard error as ``arguments`` say; ``process`` names us in every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(process, arguments.log_format))
    logging.basicConfig(level=arguments.log_level, handlers=[handler])


class _Lines(logging.Formatter):
    """One line a record, except for tracebacks in text."""

    def __init__(self, process: str, log_format: LogFormat) -> None:
        super().__init__()
        self._process = process
        self._is_json = log_format == "json"

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": f"{self._process}[{record.process}]",
            "message": record.getMessage(),
        }
        trouble = self.formatException(record.exc_info) if record.exc_info else ""
        if self._is_json:
            if trouble:
                fields["exception"] = trouble
            return msgspec.json.encode(fields).decode()
        message = fields["message"].replace("\r", "\\r").replace("\n", "\\n")
        head = f"{fields['time']} {fields['level']} {record.name} process={fields['process']}"
        line = f"{head} {message}"
        return f"{line}\n{trouble}" if trouble else line
