"""TODO app/cli."""
