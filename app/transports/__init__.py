"""How events and audio get in and out."""
