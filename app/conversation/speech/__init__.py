"""Scheduling of speech recognition and synthesis; batch transcription and synthesis."""
