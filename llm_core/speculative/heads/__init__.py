"""Draft heads (EAGLE-1, EAGLE-3, Medusa): configuration, files, PyTorch and compiled forms."""
