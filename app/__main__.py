"""``python -m app`` is the ``parley`` command."""

from __future__ import annotations

from app.cli import main

# The guard matters: worker processes import this file again.
if __name__ == "__main__":
    main()
