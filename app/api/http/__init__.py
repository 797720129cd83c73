"""Shared parts of HTTP routes: bodies, JSON limits, errors, event streams, disconnects."""
