"""Benchmarks of whole spoken turns over real sockets."""
