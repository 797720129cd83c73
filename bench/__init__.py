"""Benchmarks behind `parley bench`: what is measured, against whom, and how it is reported."""
