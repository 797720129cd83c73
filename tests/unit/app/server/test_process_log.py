"""The engine's processes log in the lines of the program that started them."""

from __future__ import annotations

import argparse
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.config import Settings
from app.engine_options import engine_config
from llm_core import EngineClient, process_logging
from tests.support.tiny_model import write_tiny_gguf

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
    process_logging.add_log_arguments(parser)
    logging.getLogger().handlers.clear()
    process_logging.start_logging(parser.parse_args(arguments), "engine")


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


def test_a_new_process_logs_as_the_one_that_starts_it(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger().setLevel(logging.WARNING)
    start(*process_logging.log_arguments(logger, "json"))
    logger.info("not asked for")
    logger.warning("ready")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "ready"


async def test_the_engine_of_a_server_writes_the_lines_of_its_settings(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()  # a folder that cannot be written, of which an engine warns
    settings = Settings(home=tmp_path, native_dir=tmp_path / "file" / "native", log_format="json")
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    engine = await EngineClient.start(engine_config(settings, path, {"standby": "false"}))
    await engine.close()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert any("runs on torch" in line["message"] for line in lines)
    assert all(line["process"].startswith("engine[") for line in lines)
