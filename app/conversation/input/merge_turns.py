"""May a caller go on with a turn that was taken for over, and was perhaps answered already?"""

from __future__ import annotations

from app.conversation.history import History
from app.conversation.input.user_turn import CommittedTurn
from app.conversation.response.pipeline import ResponsePipeline


def withdrawable(
    history: History, heard: CommittedTurn | None, answer: ResponsePipeline | None
) -> list[str]:
    """Ids of the items that vanish if ``heard``, the turn that ended last, goes on after all: it
    and what ``answer`` has said to it.

    None of them if it cannot: a word that was heard was said, what a called tool has done cannot be
    undone, and what the client has put into the conversation since stands where it stands.
    """
    if heard is None:
        return []
    items = history.since(heard.item.id)
    said = [] if answer is None else answer.response.output
    has_words = answer is not None and len(items) > 1 and answer.has_been_heard
    if has_words or any(item not in said or item.call is not None for item in items[1:]):
        return []
    return [item.id for item in items]
