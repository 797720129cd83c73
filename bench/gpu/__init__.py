"""TODO bench/gpu."""
