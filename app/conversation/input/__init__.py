"""The user's side of a conversation: audio front end, transcription, endpointing, barge-in."""
