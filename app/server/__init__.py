"""TODO app/server."""
