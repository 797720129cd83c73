"""The user turn: the caller's audio, its transcript, and when it ends."""
