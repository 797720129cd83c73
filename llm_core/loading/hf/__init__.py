"""TODO llm_core/loading/hf."""
