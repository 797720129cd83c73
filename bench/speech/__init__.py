"""TODO bench/speech."""
