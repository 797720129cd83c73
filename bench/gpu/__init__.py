"""Benchmarks and checks of the GPU kernels and of a model on one card."""
