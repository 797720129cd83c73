"""Tensor parallelism over the heads, the feed-forward and the vocabulary of a model."""
