"""Speculative decoding: who drafts tokens, and how drafts are judged."""
