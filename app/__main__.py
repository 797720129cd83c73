"""``python -m app`` is the ``parley`` command."""

from __future__ import annotations

import sys

try:
    from app.cli.main import main
except KeyboardInterrupt:  # it takes half a second, in which people change their mind
    sys.exit(130)

# The guard matters: worker processes import this file again.
if __name__ == "__main__":
    main()
