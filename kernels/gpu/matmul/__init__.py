"""TODO kernels/gpu/matmul."""
