"""How packages that not everybody needs are installed."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """The command, for error messages. Never by name alone: what a registry calls ``parley`` is
    somebody else's."""
    return (
        "in the folder that Parley was installed from: "
        f"pip install --constraint constraints.txt --editable '.[{extra}]'"
    )
