"""TODO llm_core/speculative/drafters."""
