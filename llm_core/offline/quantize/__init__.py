"""TODO llm_core/offline/quantize."""
