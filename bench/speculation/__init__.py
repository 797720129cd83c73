"""TODO bench/speculation."""
