"""TODO bench/voice."""
