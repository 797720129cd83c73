"""What was tried and withdrawn, remembered over restarts of the server."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from app.errors import ConfigError

log = logging.getLogger(__name__)

FILE_NAME = "rollout.json"


class Withdrawals:
    """A small file in the home directory. To try something again, delete its line, or the file."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the file is there and cannot be understood."""
        self._path = path
        self._known: dict[str, Any] = {}
        if path.exists():
            try:
                known = json.loads(path.read_text(encoding="utf-8"))["withdrawn"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path} cannot be read: {error}; delete it") from error
            if not isinstance(known, dict):
                raise ConfigError(f"{path}: 'withdrawn' is no object; delete the file")
            self._known = known

    def reason(self, key: str) -> str | None:
        """Why ``key`` was withdrawn; None: it was not."""
        known = self._known.get(key)
        return None if known is None else str(known["because"])

    def add(self, key: str, reason: str) -> None:
        """Remember; a disk that refuses is complained about, for the withdrawal itself holds."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._known[key] = {"because": reason, "at": at}
        partial = self._path.with_suffix(".part")
        try:
            partial.write_text(json.dumps({"withdrawn": self._known}, indent=1) + "\n")
            partial.replace(self._path)
        except OSError as error:
            log.error("the withdrawal is not remembered: %s", error)
