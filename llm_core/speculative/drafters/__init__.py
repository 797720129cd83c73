"""Drafters: prompt lookup, EAGLE heads, Medusa heads, draft models."""
