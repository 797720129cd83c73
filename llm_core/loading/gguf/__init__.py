"""TODO llm_core/loading/gguf."""
