"""The engine's side of ``guide_check``: starts that process, asks it, and replaces it."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
from collections.abc import Sequence

from llm_core import ipc
from llm_core.child_process import importable, module_command
from llm_core.errors import EngineBusyError, InternalError, InvalidRequestError
from llm_core.messages import Guide
from llm_core.structured.checker_process import WALL_LIMIT_S, Checked, CheckGuide, Setup
from llm_core.structured.grammar import Grammar, name_of

logger = logging.getLogger("llm_core.structured.checker")

# What the process has for itself: to read the vocabulary before the first answer, and to be slow.
_MARGIN_S = 15.0


class GuideChecker:
    """One process, started again when it ends. One thread at a time."""

    def __init__(self, setup: Setup, log_arguments: Sequence[str]) -> None:
        """``log_arguments``: see ``process_log``."""
        self._setup = setup
        self._log_arguments = log_arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def start(self) -> None:
        """Starts the process, if there is none, without waiting for it. Raises OSError."""
        if self._connection is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            ours.settimeout(WALL_LIMIT_S + _MARGIN_S)
            self._connection = ours
            self._process = subprocess.Popen(
                module_command(
                    "llm_core.structured.checker_process",
                    "--fd",
                    str(theirs.fileno()),
                    *self._log_arguments,
                ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=importable(os.environ),
            )
        ipc.send(ours, self._setup)

    def check(self, guide: Guide) -> tuple[Grammar, int]:
        """The grammar of a guide that can be compiled, and the bytes that takes, about. Blocks.

        Raises InvalidRequestError, naming the parameter; EngineBusyError when there was no time to
        find out; InternalError when the process cannot run.
        """
        checked = self._ask(guide)
        if checked.is_late:
            raise EngineBusyError(
                f"{name_of(guide)}: there was no time to check it within {WALL_LIMIT_S:g} s; "
                "try again later"
            )
        if checked.error:
            raise InvalidRequestError(checked.error)
        return Grammar(checked.grammar, name_of(guide)), checked.num_bytes

    def close(self) -> None:
        """Ends the process and waits for it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _ask(self, guide: Guide) -> Checked:
        for is_last in (False, True):
            try:
                self.start()
                assert self._connection is not None
                ipc.send(self._connection, CheckGuide(guide))
                if (checked := ipc.receive(self._connection, Checked)) is not None:
                    return checked
                reason = "it has ended"
            except (OSError, ipc.ProtocolError) as error:  # a time limit is an OSError, too
                reason = str(error)
            logger.error("the process that checks guides does not answer: %s", reason)
            self.close()
            if is_last:
                break
        raise InternalError("guides cannot be checked; the engine's log has the reason")
