"""Recovery from a false endpoint: which items vanish when the caller continues the last turn."""

from __future__ import annotations

from app.conversation.history import History
from app.conversation.input.user_turn import CommittedTurn
from app.conversation.response.pipeline import ResponsePipeline


def mergeable_items(
    history: History, last_turn: CommittedTurn | None, response: ResponsePipeline | None
) -> list[str]:
    """Ids of the items to delete when ``last_turn`` goes on: its own and those of ``response``.

    Empty when the turns cannot be merged: some of the response was heard, a tool was called (its
    effect cannot be undone), or the client has added items since.
    """
    if last_turn is None:
        return []
    items = history.since(last_turn.item.id)
    output = [] if response is None else response.response.output
    was_heard = response is not None and len(items) > 1 and response.has_been_heard
    if was_heard or any(item not in output or item.call is not None for item in items[1:]):
        return []
    return [item.id for item in items]
