"""What was said: the items of a conversation, and what of them the caller really heard.

history   what is kept = text whose audio lies wholly in [0, heard)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile

from app.conversation.events import Item, ToolCall
from app.errors import ClientError
from audio.playout import PlayoutTimeline
from llm_core import ChatMessage, ToolSpec
from llm_core import ToolCall as LlmToolCall

MAX_ITEMS = 2_000
MAX_CHARS = 4_000_000


@dataclass(slots=True)
class SpokenRecord:
    """The words of an assistant item over its audio, and how much of it was heard.

    All counts are samples at ``rate`` Hz::

        [0, sent) heard, or in the client's player | [sent, furthest) discarded by a pause

    Discarded audio is sent again when playback resumes.
    """

    rate: int
    timeline: PlayoutTimeline = field(default_factory=PlayoutTimeline)
    sent_samples: int = 0
    furthest_samples: int = 0
    """The largest position that was ever sent; a pause does not lower it."""
    delivered_samples: int = 0
    """All audio sent for this item, with what was sent twice after a pause."""
    kept_samples: int | None = None
    """Where history was cut; None: not cut. Only the client may move it forward."""

    def send(self, num_samples: int) -> None:
        """Count audio that is sent now, at position ``sent_samples``."""
        self.sent_samples += num_samples
        self.delivered_samples += num_samples
        self.furthest_samples = max(self.furthest_samples, self.sent_samples)

    def discard_after(self, num_samples: int) -> None:
        """The player discards what lies after ``num_samples``; it may be sent again."""
        self.sent_samples = min(self.sent_samples, num_samples)

    @property
    def sent_ms(self) -> int:
        """Length of the audio that the client has."""
        return self.sent_samples * 1000 // self.rate

    @property
    def delivered_ms(self) -> int:
        """Length of all audio that the client received for the item, a begun millisecond whole."""
        return -(-self.delivered_samples * 1000 // self.rate)


@dataclass(slots=True)
class _Entry:
    item: Item
    spoken: SpokenRecord | None = None
    is_forgotten: bool = False  # by the model: its context is too short for the whole conversation
    is_for_model: bool = True

    @property
    def words(self) -> str:
        return " ".join(p.text for p in self.item.content if p.text).strip()


class History:
    """The conversation's items, in order."""

    def __init__(self) -> None:
        self.summary = ""
        """Of what the model has forgotten; stands behind the instructions."""
        self._entries: list[_Entry] = []
        self._evicted: list[str] = []
        self._withdrawn: list[str] = []

    @classmethod
    def of(cls, items: Iterable[Item]) -> History:
        """A history of its own that holds ``items``."""
        history = cls()
        history._entries = [_Entry(item) for item in items]
        return history

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_forgotten(self) -> int:
        """Items that the model's context has no room for."""
        return sum(entry.is_forgotten for entry in self._entries)

    def append_own(self, item: Item, *, is_for_model: bool = True) -> str | None:
        """Append an item that the server made. Never fails: a full history loses its oldest items.

        Returns the id of the item before it. What was lost is for ``take_evicted`` to tell. What is
        not ``is_for_model`` is left out of ``messages``.
        """
        while len(self._entries) >= MAX_ITEMS or self._num_chars() > MAX_CHARS:
            self._evicted.append(self._entries.pop(0).item.id)
        self._entries.append(_Entry(item, is_for_model=is_for_model))
        return self.previous_id(item.id)

    def take_evicted(self) -> list[str]:
        """Ids of the items that were lost since the last call; the client must hear of them."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def add(self, item: Item, previous_item_id: str | None = None) -> str | None:
        """Insert a client's item, at the end or behind ``previous_item_id`` ("root": in front).

        Returns the id of the item before it. Raises ClientError when the item's id is taken, the
        previous item is unknown, the history is full, or a tool's output belongs to no call.
        """
        num_chars = self._num_chars() + item.num_chars
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
        if item.output is not None:
            self._check_output(item.output.call_id)
        at = len(self._entries)
        if previous_item_id == "root":
            at = 0
        elif previous_item_id is not None:
            at = self._index(previous_item_id, "create", "previous_item_id") + 1
        self._entries.insert(at, _Entry(item))
        return self._entries[at - 1].item.id if at else None

    def since(self, item_id: str) -> list[Item]:
        """The item and all behind it; none when it is not there."""
        ids = [entry.item.id for entry in self._entries]
        at = ids.index(item_id) if item_id in ids else len(ids)
        return [entry.item for entry in self._entries[at:]]

    def get(self, item_id: str) -> Item:
        """Raises ClientError when there is no such item."""
        return self._entries[self._index(item_id, "retrieve")].item

    def delete(self, item_id: str) -> None:
        """Raises ClientError when there is no such item."""
        del self._entries[self._index(item_id, "delete")]

    def withdraw(self, item_ids: list[str]) -> None:
        """Take items back that turned out to be part of nothing. Others than ``delete``d ones the
        client may still cut: it had not heard of it yet."""
        self._withdrawn = item_ids
        self._entries = [entry for entry in self._entries if entry.item.id not in item_ids]

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

    def truncate(
        self, item_id: str, content_index: int, audio_end_ms: int, *, may_extend: bool = True
    ) -> None:
        """Cut an item where the client says that its playback ended.

        A client that owns the playback knows better than the server's estimate: its position also
        replaces an earlier cut that was shorter. Where the transport plays (``may_extend`` False),
        the shorter one of both stays.

        Raises ClientError when the item is unknown or has no audio, or when ``audio_end_ms`` lies
        beyond all audio that was ever sent for it, whatever was discarded of that meanwhile.
        """
        if item_id in self._withdrawn:
            return
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
        delivered_ms = entry.spoken.delivered_ms
        if audio_end_ms > delivered_ms:
            raise ClientError(
                f"Audio content of {delivered_ms}ms is already shorter than {audio_end_ms}ms",
                code="invalid_value",
                param="audio_end_ms",
            )
        heard = audio_end_ms * entry.spoken.rate // 1000
        if not may_extend and entry.spoken.kept_samples is not None:
            heard = min(heard, entry.spoken.kept_samples)
        _set_heard(entry, heard)

    def messages(self, instructions: str, tools: tuple[ToolSpec, ...] = ()) -> list[ChatMessage]:
        """The conversation for the model, which may call ``tools``.

        Items without words (silence, an answer of which nothing was heard) are left out, and so are
        calls that have not come back.
        """
        said = [message for message, _ in self._told()]
        if self.summary:
            instructions = f"{instructions}\n\nEarlier in this conversation: {self.summary}".strip()
        if not instructions and not tools:
            return said
        return [ChatMessage("system", instructions, tools=tools), *said]

    def forget_oldest(self, dropped: Sequence[ChatMessage]) -> None:
        """Leave out of ``messages`` from now on what a prompt had no room for.

        ``dropped``: the oldest messages behind those of the system, which are kept. The cut stays
        where it is, so that the prompts to come share their beginning. What does not begin so any
        more (a client has deleted an item meanwhile) is not touched.
        """
        told = dropwhile(lambda pair: pair[0].role == "system", self._told())
        for (message, entries), gone in zip(told, dropped, strict=False):
            if message != gone:
                return
            for entry in entries:
                entry.is_forgotten = True

    def _told(self) -> list[tuple[ChatMessage, list[_Entry]]]:
        """The messages, each with the entries that it tells of.

        A call and what came of it stand together, wherever the client has put its output: behind
        the words that the model said before it, in the same message as calls beside it.
        """
        outputs = {e.item.output.call_id: e for e in self._entries if e.item.output is not None}
        told: list[tuple[ChatMessage, list[_Entry]]] = []
        results: list[tuple[ChatMessage, list[_Entry]]] = []
        for entry in self._entries:
            if entry.is_forgotten or not entry.is_for_model or entry.item.output is not None:
                continue
            call = entry.item.call
            if call is None:
                if entry.words:
                    told += [*results, (ChatMessage(entry.item.role, entry.words), [entry])]
                    results = []
                continue
            answer = _result_of(call, outputs)
            if answer is None:
                continue
            text, sources = answer
            made = LlmToolCall(call_id=call.call_id, name=call.name, arguments=call.arguments)
            if told and told[-1][0].role == "assistant":
                message, entries = told.pop()
                calls = (*message.tool_calls, made)
                told.append((ChatMessage("assistant", message.content, calls), [*entries, entry]))
            else:
                told += results
                results = []
                told.append((ChatMessage("assistant", "", (made,)), [entry]))
            results.append((ChatMessage("tool", text, call_id=call.call_id), sources))
        return told + results

    def _check_output(self, call_id: str) -> None:
        calls = [e.item.call for e in self._entries if e.item.call is not None]
        if not any(call.call_id == call_id and not call.runs_here for call in calls):
            why = "no function call with this call_id in the conversation"
        elif any(e.item.output and e.item.output.call_id == call_id for e in self._entries):
            why = "this function call has its output already"
        else:
            return
        raise ClientError(
            f"Invalid 'item.call_id' {call_id!r}: {why}.",
            code="invalid_tool_call_id",
            param="item.call_id",
        )

    def _num_chars(self) -> int:
        return sum(entry.item.num_chars for entry in self._entries)

    def _index(self, item_id: str, verb: str, param: str = "item_id") -> int:
        for index, entry in enumerate(self._entries):
            if entry.item.id == item_id:
                return index
        raise ClientError(
            f"no item with the id {item_id!r} in this conversation",
            code=f"item_{verb}_invalid_{param}",
            param=param,
        )


def without_tools(messages: list[ChatMessage]) -> list[ChatMessage]:
    """The same prompt, offering nothing to call."""
    first, rest = messages[0], messages[1:]
    if not first.tools:
        return messages
    kept = [ChatMessage(first.role, first.content)] if first.content else []
    return [*kept, *rest]


def _result_of(call: ToolCall, outputs: dict[str, _Entry]) -> tuple[str, list[_Entry]] | None:
    """What came of a call, for the model, and the entry that holds it; None: nothing yet."""
    if call.runs_here:
        if call.error is not None:
            return f"Error: {call.error}", []
        return None if call.output is None else (call.output, [])
    entry = outputs.get(call.call_id)
    if entry is None or entry.item.output is None:
        return None
    return entry.item.output.output, [entry]


def _set_heard(entry: _Entry, heard_samples: int) -> None:
    assert entry.spoken is not None
    part = entry.item.content[0]
    heard = entry.spoken.kept_samples = min(heard_samples, entry.spoken.furthest_samples)
    part.text = entry.spoken.timeline.heard_text(heard)
    part.audio_ms = heard * 1000 / entry.spoken.rate
    entry.item.status = "incomplete"
