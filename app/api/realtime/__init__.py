"""TODO app/api/realtime."""
