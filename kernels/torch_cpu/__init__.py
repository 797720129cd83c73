"""Fast CPU implementations of the operations in ``kernels.reference``, in torch."""
