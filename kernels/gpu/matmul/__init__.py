"""Matrix products with float, INT4, INT8 and FP8 weights."""
