"""TODO bench/load."""
