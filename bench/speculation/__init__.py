"""Acceptance and speed of draft tokens."""
