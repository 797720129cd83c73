"""What all benchmarks share: the machine, figures, results as tables and JSON files, charts."""
