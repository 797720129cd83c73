"""TODO kernels/gpu/sampling."""
