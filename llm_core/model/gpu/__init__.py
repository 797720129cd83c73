"""TODO llm_core/model/gpu."""
