"""GGUF files: container, configuration and weights."""
