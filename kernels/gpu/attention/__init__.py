"""TODO kernels/gpu/attention."""
