"""Weights in their stored formats, and the layer that multiplies by them."""
