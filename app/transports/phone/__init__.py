"""Phone calls: the media protocols of providers, and the line that they have in common."""
