"""TODO app/conversation/input."""
