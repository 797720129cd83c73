"""Structured output: guides as grammars, compiled within limits, applied as token masks."""
