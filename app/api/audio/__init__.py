"""``/v1/audio``: transcription of files and speech synthesis."""
