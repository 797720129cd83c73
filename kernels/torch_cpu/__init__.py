"""TODO kernels/torch_cpu."""
