"""Signal and speech processing: codecs, resampling, VAD, speech recognition and synthesis.

Independent of networks and language models. Audio is float32 mono in [-1, 1].
"""
