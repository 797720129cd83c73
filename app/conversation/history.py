"""What was said: the items of a conversation, and what of them the caller really heard.

history   what is kept = text whose audio lies wholly in [0, heard)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from app.conversation.events import Item
from app.errors import ClientError
from audio.playout import PlayoutTimeline
from llm_core import ChatMessage

MAX_ITEMS = 2_000
MAX_CHARS = 4_000_000


@dataclass(slots=True)
class SpokenRecord:
    """How the words of an assistant item lie in its audio, and how much of it was heard.

    ``sent_samples``: audio that went to the client, at ``rate`` Hz.
    """

    rate: int
    timeline: PlayoutTimeline = field(default_factory=PlayoutTimeline)
    sent_samples: int = 0
    kept_samples: int | None = None
    """Where history was cut; None: not cut. Only the client may move it on."""

    @property
    def sent_ms(self) -> int:
        """Length of the audio that the client has."""
        return self.sent_samples * 1000 // self.rate


@dataclass(slots=True)
class _Entry:
    item: Item
    spoken: SpokenRecord | None = None
    is_forgotten: bool = False  # by the model: its context is too short for the whole conversation

    @property
    def words(self) -> str:
        return " ".join(p.text for p in self.item.content if p.text).strip()


class History:
    """The conversation's items, in order."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def append_own(self, item: Item) -> str | None:
        """Append an item that the server made. Never fails: a full history loses its oldest items.

        Returns the id of the item before it.
        """
        while len(self._entries) >= MAX_ITEMS or self._num_chars() > MAX_CHARS:
            del self._entries[0]
        self._entries.append(_Entry(item))
        return self.previous_id(item.id)

    def add(self, item: Item, previous_item_id: str | None = None) -> str | None:
        """Insert a client's item, at the end or behind ``previous_item_id`` ("root": in front).

        Returns the id of the item before it. Raises ClientError when the item's id is taken, the
        previous item is unknown, or the history is full.
        """
        num_chars = self._num_chars() + sum(len(part.text or "") for part in item.content)
        if len(self._entries) >= MAX_ITEMS or num_chars > MAX_CHARS:
            raise ClientError(
                f"the conversation is full ({MAX_ITEMS} items or {MAX_CHARS} characters): delete "
                "some items or start a new session",
                code="conversation_full",
            )
        if item.id == "root" or any(e.item.id == item.id for e in self._entries):
            raise ClientError(
                f"an item with the id {item.id!r} exists already",
                code="item_create_duplicate_item_id",
                param="item.id",
            )
        at = len(self._entries)
        if previous_item_id == "root":
            at = 0
        elif previous_item_id is not None:
            at = self._index(previous_item_id, "create", "previous_item_id") + 1
        self._entries.insert(at, _Entry(item))
        return self._entries[at - 1].item.id if at else None

    def get(self, item_id: str) -> Item:
        """Raises ClientError when there is no such item."""
        return self._entries[self._index(item_id, "retrieve")].item

    def delete(self, item_id: str) -> None:
        """Raises ClientError when there is no such item."""
        del self._entries[self._index(item_id, "delete")]

    def previous_id(self, item_id: str) -> str | None:
        """Id of the item before ``item_id``; None for the first one or a deleted one."""
        ids = [e.item.id for e in self._entries]
        at = ids.index(item_id) if item_id in ids else 0
        return ids[at - 1] if at else None

    def attach_audio(self, item_id: str, spoken: SpokenRecord) -> None:
        """Remember how an assistant item was spoken, so that it can be cut."""
        for entry in self._entries:
            if entry.item.id == item_id:
                entry.spoken = spoken

    def cut(self, item_id: str, heard_samples: int) -> None:
        """Keep of a spoken item only what the caller heard of it; a deleted item is ignored."""
        for entry in self._entries:
            if entry.item.id == item_id and entry.spoken is not None:
                kept = entry.spoken.kept_samples
                _set_heard(entry, heard_samples if kept is None else min(heard_samples, kept))

    def truncate(self, item_id: str, content_index: int, audio_end_ms: int) -> None:
        """The client says how much was heard; it knows better than we do.

        Raises ClientError when the item is unknown, has no audio, or less than ``audio_end_ms``.
        """
        entry = self._entries[self._index(item_id, "truncate")]
        if entry.spoken is None or entry.item.role != "assistant":
            raise ClientError(
                f"item {item_id!r} is not an assistant message with audio: nothing to truncate",
                code="item_truncate_invalid_item_id",
                param="item_id",
            )
        if content_index != 0:
            raise ClientError(
                f"content_index {content_index} does not exist: the item has one content part (0)",
                code="invalid_value",
                param="content_index",
            )
        sent_ms = entry.spoken.sent_ms
        if audio_end_ms > sent_ms:
            raise ClientError(
                f"Audio content of {sent_ms}ms is already shorter than {audio_end_ms}ms",
                code="invalid_value",
                param="audio_end_ms",
            )
        _set_heard(entry, audio_end_ms * entry.spoken.rate // 1000)

    def messages(self, instructions: str) -> list[ChatMessage]:
        """The conversation for the model.

        Items without words (silence, an answer of which nothing was heard) are left out.
        """
        said = [
            ChatMessage(entry.item.role, words)
            for entry in self._entries
            if not entry.is_forgotten and (words := entry.words)
        ]
        return ([ChatMessage("system", instructions)] if instructions else []) + said

    def forget_oldest(self, num_messages: int) -> None:
        """Leave the oldest ``num_messages`` out of ``messages`` from now on.

        The cut stays where it is, so that the prompts to come share their beginning.
        """
        for entry in self._entries:
            if num_messages > 0 and not entry.is_forgotten and entry.words:
                entry.is_forgotten = True
                num_messages -= 1

    def _num_chars(self) -> int:
        return sum(len(part.text or "") for e in self._entries for part in e.item.content)

    def _index(self, item_id: str, verb: str, param: str = "item_id") -> int:
        for index, entry in enumerate(self._entries):
            if entry.item.id == item_id:
                return index
        raise ClientError(
            f"no item with the id {item_id!r} in this conversation",
            code=f"item_{verb}_invalid_{param}",
            param=param,
        )


def shortened(messages: list[ChatMessage]) -> list[ChatMessage] | None:
    """The instructions and the newest messages, about half of the characters; None: no shorter.

    Half, not just enough: the next turns have room too, and a beginning that stays the same.
    """
    first = 1 if messages and messages[0].role == "system" else 0
    kept = messages[first:]
    target = sum(len(message.content) for message in kept) // 2
    while len(kept) > 1 and sum(len(message.content) for message in kept) > target:
        kept = kept[1:]
    return messages[:first] + kept if len(kept) < len(messages) - first else None


def _set_heard(entry: _Entry, heard_samples: int) -> None:
    assert entry.spoken is not None
    part = entry.item.content[0]
    heard = entry.spoken.kept_samples = min(heard_samples, entry.spoken.sent_samples)
    part.text = entry.spoken.timeline.heard_text(heard)
    part.audio_ms = heard * 1000 / entry.spoken.rate
    entry.item.status = "incomplete"
