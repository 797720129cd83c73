"""One response: from the request to the engine to the audio that was heard."""
