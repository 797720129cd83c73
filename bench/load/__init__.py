"""Load benchmarks: arrivals of real requests, and simulated callers."""
