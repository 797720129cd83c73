"""TODO app/api/audio."""
