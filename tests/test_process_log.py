"""The engine's processes log in the lines of the program that started them."""

from __future__ import annotations

import argparse
import json
import logging
import re
from collections.abc import Iterator

import pytest

from app.config import Settings
from app.logging_setup import setup_logging
from llm_core import process_log

logger = logging.getLogger("llm_core.here")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def start(*arguments: str) -> None:
    """Logging as a new process has it."""
    parser = argparse.ArgumentParser()
    process_log.add_log_arguments(parser)
    logging.getLogger().handlers.clear()
    process_log.start_logging(parser.parse_args(arguments), "engine")


def a_failure() -> None:
    try:
        raise ValueError("no such thing")
    except ValueError:
        logger.exception("it\nfailed")


def test_text_has_the_form_of_the_servers_lines(capsys: pytest.CaptureFixture[str]) -> None:
    start("--log-level", "INFO")
    logger.info("ready %d", 7)
    logger.debug("not asked for")
    a_failure()
    first, second, *trace = capsys.readouterr().err.splitlines()
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(rf"{stamp} info llm_core.here process=engine\[\d+\] ready 7", first)
    assert second.endswith("it\\nfailed") and trace[-1] == "ValueError: no such thing"


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    start("--log-format", "json")
    logger.info("ready")
    a_failure()
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("info", logger.name, "ready")
    assert first["process"].startswith("engine[") and first["time"].endswith("Z")
    assert second["message"] == "it\nfailed" and "no such thing" in second["exception"]


def test_processes_are_told_what_the_settings_say() -> None:
    setup_logging(Settings(log_format="json", log_level="warning"))
    wanted = ["--log-level", "WARNING", "--log-format", "json"]
    assert process_log.log_arguments(logger) == wanted
    setup_logging(Settings(log_format="text", log_level="info"))
    assert process_log.log_arguments(logger) == ["--log-level", "INFO", "--log-format", "text"]
    start(*wanted)
    assert process_log.log_arguments(logger) == wanted, "an engine passes it on to its ranks"
