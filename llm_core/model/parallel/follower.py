"""A rank above 0: ``python -m llm_core.model.parallel.follower --rank N --folder DIR``.

Started by rank 0, the engine process (``launch``). Reads an ``EngineConfig`` as one line of JSON,
loads its share of the model, and does what rank 0 does until its standard input is closed.
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
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides, by ending
        signal.signal(number, signal.SIG_IGN)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    threading.Thread(target=_end_with_parent, daemon=True, name="parent").start()
    return follow(config, arguments.folder, arguments.rank)


def follow(config: EngineConfig, folder: Path, rank: int) -> int:
    """The process's exit status; why it is not 0 is in the log."""
    try:
        ModelRunner.follow(config, folder, rank)
    except ModelLoadError as error:
        logger.error("rank %d cannot load its share of the model: %s", rank, error)
        return 1
    except RuntimeError:  # torch.distributed's when another rank is gone, and the GPU's own
        logger.exception("rank %d ends", rank)
        return 1
    return 0


def _end_with_parent() -> None:
    """The parent writes nothing more; the end of the pipe is its own end."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
