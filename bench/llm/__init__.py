"""TODO bench/llm."""
