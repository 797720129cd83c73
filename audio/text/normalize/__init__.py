"""TODO audio/text/normalize."""
