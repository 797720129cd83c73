"""ASR and TTS scheduling, shared by all sessions."""
