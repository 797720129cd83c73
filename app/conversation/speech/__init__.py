"""TODO app/conversation/speech."""
