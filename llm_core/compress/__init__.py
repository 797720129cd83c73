"""Work on whole models that nobody waits for: measuring, quantising, pruning, distilling."""
