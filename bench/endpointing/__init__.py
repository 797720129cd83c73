"""Data and fits for the end-of-turn detector."""
