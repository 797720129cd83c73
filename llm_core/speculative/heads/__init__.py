"""TODO llm_core/speculative/heads."""
