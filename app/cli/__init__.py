"""The ``parley`` command: one module per command."""
