"""A rank above 0: ``python -m llm_core.model.parallel.follower --rank N --folder DIR``.

Started by rank 0, the engine process (``launch``). Reads an ``EngineConfig`` as one line of JSON,
loads its share of the model, and repeats rank 0's calls until its standard input is closed.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec

from llm_core.errors import ModelLoadError
from llm_core.messages import EngineConfig
from llm_core.model.runner import ModelRunner
from llm_core.process_logging import add_log_arguments, start_logging

logger = logging.getLogger("llm_core.model.parallel")


def main() -> int:
    parser = argparse.ArgumentParser(description="one rank of a model; started by the engine")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where the ranks meet")
    add_log_arguments(parser)
    arguments = parser.parse_args()
    start_logging(arguments, f"rank{arguments.rank}")
    for number in (signal.SIGINT, signal.SIGTERM):  # it exits with rank 0
        signal.signal(number, signal.SIG_IGN)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    threading.Thread(target=_end_with_parent, daemon=True, name="parent").start()
    return follow(config, arguments.folder, arguments.rank)


def follow(config: EngineConfig, folder: Path, rank: int) -> int:
    """Runs the rank and returns the exit status; failures are logged."""
    try:
        ModelRunner.follow(config, folder, rank)
    except ModelLoadError as error:
        logger.error("rank %d cannot load its share of the model: %s", rank, error)
        return 1
    except RuntimeError:  # of torch.distributed if another rank has exited, or of the GPU
        logger.exception("rank %d ends", rank)
        return 1
    return 0


def _end_with_parent() -> None:
    """Exits when the parent does, which closes the pipe."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
