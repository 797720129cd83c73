"""Model files -> configuration and named tensors."""
