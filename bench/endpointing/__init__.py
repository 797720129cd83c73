"""TODO bench/endpointing."""
