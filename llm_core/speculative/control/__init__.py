"""TODO llm_core/speculative/control."""
