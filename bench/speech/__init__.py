"""Benchmarks of recognition, noise, echo and packet loss on recorded speech."""
