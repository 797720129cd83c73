"""Benchmarks of the code itself: the files and calls that one turn needs."""
