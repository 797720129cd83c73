"""Benchmarks of Parley. ``python -m bench`` lists them."""
