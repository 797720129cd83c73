"""The decoder on a GPU: packed steps, CUDA graphs, and the device's KV cache."""
