"""A voice over an answer: when it is an interruption before its words are known, and when none."""

from __future__ import annotations

from app.conversation.response.pipeline import ResponsePipeline

# Nobody says "mhm" for so long.
_SURE_S = 1.5
# Over the end of an answer, which cannot be held and goes on meanwhile, it is decided sooner.
_SURE_OVER_THE_END_S = 0.9


def is_sure(voice_s: float, running: ResponsePipeline | None) -> bool:
    """Whether a voice of ``voice_s``, padding included, over the ``running`` answer (None: over the
    end of one that was sent whole) is meant to stop it, whatever it says."""
    return voice_s > (_SURE_OVER_THE_END_S if running is None else _SURE_S)


def lingers(last: ResponsePipeline | None, running: ResponsePipeline | None) -> bool:
    """The last answer was sent whole, is still being heard, and does not ask for one itself."""
    if last is None or running is not None or not last.is_playing:
        return False
    return not last.text.rstrip(" \"'”’)*").endswith("?")
