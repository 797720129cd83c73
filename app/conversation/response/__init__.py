"""TODO app/conversation/response."""
