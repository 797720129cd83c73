"""TODO bench/quantization."""
