"""Tensor parallelism: the heads, the feed-forward and the vocabulary of one model over ranks."""
