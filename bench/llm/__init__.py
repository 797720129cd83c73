"""Benchmarks of the language-model engine."""
