"""Signal and speech: codecs, resampling, voice activity, recognition, synthesis.

Knows nothing of networks or language models. Audio inside is float32 mono in [-1, 1].
"""
