"""Barge-in detection from voice activity alone, used until the transcript arrives."""

from __future__ import annotations

from app.conversation.response.pipeline import ResponsePipeline

# Longer speech is no backchannel such as "mhm".
_CONFIDENT_S = 1.5
# At the tail of a response, which cannot be paused and plays on meanwhile, sooner.
_CONFIDENT_IN_TAIL_S = 0.9


def is_confident(speech_s: float, running: ResponsePipeline | None) -> bool:
    """True when speech of ``speech_s``, prefix padding included, is a barge-in whatever it says.

    ``running``: the response that it is spoken over; None: the tail of one that was sent whole.
    """
    return speech_s > (_CONFIDENT_IN_TAIL_S if running is None else _CONFIDENT_S)


def in_tail_grace(last: ResponsePipeline | None, running: ResponsePipeline | None) -> bool:
    """True while the tail of a response plays that was sent whole and does not end in a question.

    Speech in this time may be a backchannel, as during a running response.
    """
    if last is None or running is not None or not last.is_playing:
        return False
    return not last.text.rstrip(" \"'”’)*").endswith("?")
