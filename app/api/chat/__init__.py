"""TODO app/api/chat."""
