"""Sampling of tokens on the device."""
