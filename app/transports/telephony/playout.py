"""What is still to be said to a phone, and what of it has been heard.

    [0, heard) in the caller's ear | [heard, sent) at the provider | waiting | has not come yet

The provider plays what it gets; marks that it gives back say how far it is. In between, and where a
protocol has no marks, the clock says it: nothing plays faster than time. Positions are samples
since the call began and never go back. Pure: time is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from app.transports.audio_port import Cut, Playback
from audio.codecs import AudioFormat

_NS = 1_000_000_000
# So often the provider is asked how far it is: a cut is exact to less than this.
MARK_EVERY_MS = 100
# A mark that is so late will not come any more; the clock must do.
MARK_GRACE_MS = 3_000
_SILENCE = {"pcmu": b"\xff", "pcma": b"\xd5", "pcm16": b"\0"}


@dataclass(slots=True)
class _Item:
    response_id: str
    item_id: str
    waiting: bytearray
    start: int | None = None  # position of its first sample, once it was sent
    end: int = 0
    is_finished: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """To be sent now: audio, a mark behind it, or both."""

    payload: bytes
    mark: str | None


class PhonePlayout:
    """One call's. ``on_playback`` hears when the sound of a response starts and when it ends."""

    def __init__(
        self,
        audio_format: AudioFormat,
        *,
        frame_ms: int,
        lead_ms: int,
        has_marks: bool,
        on_playback: Callable[[Playback], None],
    ) -> None:
        self._rate, self._sample_len = audio_format.rate, audio_format.sample_len
        self._silence = _SILENCE[audio_format.encoding]
        self._frame_bytes = audio_format.rate * frame_ms // 1000 * self._sample_len
        self._frame_ns = frame_ms * 1_000_000
        self._lead_ns = lead_ms * 1_000_000
        self._has_marks = has_marks
        self._on_playback = on_playback
        self._items: deque[_Item] = deque()
        self._sounding = ""
        self._sent = 0
        self._ends_ns = 0  # when the provider will have played all, if it began at once
        self._marks: deque[tuple[str, int]] = deque()  # not given back yet
        self._marked = 0  # up to here something was asked about
        self._heard, self._heard_ns = 0, 0  # by the last mark, and when it came
        self._has_heard_mark = False  # since the sound began

    @property
    def waiting_ms(self) -> float:
        """Length of the audio that waits to be sent."""
        num_bytes = sum(len(item.waiting) for item in self._items)
        return num_bytes * 1000 / (self._sample_len * self._rate)

    @property
    def is_idle(self) -> bool:
        """All that came was heard, or taken back."""
        return not self._items

    def push(self, response_id: str, item_id: str, payload: bytes) -> None:
        """Queue audio of an item, whole samples."""
        last = self._items[-1] if self._items else None
        if last is None or last.item_id != item_id or last.is_finished:
            if last is not None:
                last.is_finished = True
            last = _Item(response_id, item_id, bytearray())
            self._items.append(last)
        last.waiting += payload

    def finish(self, response_id: str) -> None:
        """No more audio comes for this response."""
        for item in self._items:
            if item.response_id == response_id:
                item.is_finished = True

    def next_frame(self, now_ns: int) -> Frame | None:
        """What may be sent at ``now_ns``, if anything. Audio comes in whole frames, always.

        Less than a frame waits for its rest; if there is none, silence fills it.
        """
        if self._ends_ns - self._lead_ns > now_ns:
            return None
        if not self._has_frame():
            return self._last_mark(now_ns)
        payload = b""
        for item in self._items:
            missing = self._frame_bytes - len(payload)
            if not missing or (len(item.waiting) < missing and not item.is_finished):
                break
            payload += self._take(item, missing, self._sent + len(payload) // self._sample_len)
        payload += self._silence * (self._frame_bytes - len(payload))
        if self._ends_ns <= now_ns:
            self._begin(now_ns)
        self._sent += len(payload) // self._sample_len
        self._ends_ns += self._frame_ns
        is_due = (self._sent - self._marked) * 1000 >= MARK_EVERY_MS * self._rate
        return Frame(payload, self._new_mark() if is_due or self._all_sent else None)

    def wait_s(self, now_ns: int) -> float | None:
        """Seconds until something is to be done; None: not before something changes."""
        if not self._items:
            return None
        if self._has_frame():
            return max(0, self._ends_ns - self._lead_ns - now_ns) / _NS
        late_ns = MARK_GRACE_MS * 1_000_000 if self._has_marks else 0
        return max(1_000_000, self._ends_ns + late_ns - now_ns) / _NS if self._all_sent else None

    def reached(self, name: str, now_ns: int) -> None:
        """The provider gave a mark back. One that was taken back means nothing."""
        if name not in (known for known, _ in self._marks):
            return
        while self._marks:
            known, position = self._marks.popleft()
            self._heard, self._heard_ns = position, now_ns
            self._has_heard_mark = True
            if known == name:
                break
        self.retire(now_ns)

    def retire(self, now_ns: int) -> None:
        """Forget what was heard to its end, and tell."""
        heard = self.heard(now_ns)
        while self._items:
            item = self._items[0]
            if (
                item.waiting
                or not item.is_finished
                or (item.start is not None and item.end > heard)
            ):
                return
            self._items.popleft()
            more = bool(self._items) and self._items[0].response_id == item.response_id
            if item.start is not None and not more:
                self._sounding = ""
                self._on_playback(Playback("stopped", item.response_id))

    def heard(self, now_ns: int) -> int:
        """Up to which sample the caller has heard, as far as can be known."""
        if not self._has_marks:
            return max(self._heard, self._played(now_ns))
        known = self._heard
        if self._marks and self._has_heard_mark:  # between two marks it goes on with the time
            elapsed = (now_ns - self._heard_ns) * self._rate // _NS
            known = min(self._heard + elapsed, self._marks[0][1])
        return max(known, self._played(now_ns - MARK_GRACE_MS * 1_000_000))

    def _played(self, now_ns: int) -> int:
        """By the clock."""
        return self._sent - max(0, self._ends_ns - now_ns) * self._rate // _NS

    def clear(self, now_ns: int) -> Cut | None:
        """Take back all that was not heard. None: there was nothing."""
        heard = self.heard(now_ns)
        self.retire(now_ns)
        cut = None
        if self._items:
            item = self._items[0]
            heard_samples = 0 if item.start is None else min(heard, item.end) - item.start
            heard_ms = max(0, heard_samples) * 1000 // self._rate
            cut = Cut(item.response_id, item.item_id, heard_ms)
        self._items.clear()
        self._marks.clear()
        self._sounding = ""
        self._heard = self._marked = self._sent
        self._ends_ns = min(self._ends_ns, now_ns)
        return cut

    def _has_frame(self) -> bool:
        """A whole frame waits, or the end of an item, which need not wait for the next one."""
        num_bytes = 0
        for item in self._items:
            if len(item.waiting) < self._frame_bytes - num_bytes and not item.is_finished:
                break
            num_bytes += len(item.waiting)
            if num_bytes >= self._frame_bytes:
                break
        return num_bytes > 0

    @property
    def _all_sent(self) -> bool:
        return all(item.is_finished and not item.waiting for item in self._items)

    def _begin(self, now_ns: int) -> None:
        """Sound after silence."""
        self._ends_ns = now_ns
        if not self._marks:
            self._has_heard_mark = False

    def _take(self, item: _Item, num_bytes: int, position: int) -> bytes:
        part = bytes(item.waiting[:num_bytes])
        del item.waiting[:num_bytes]
        if part and item.start is None:
            item.start = position
            if item.response_id != self._sounding:
                self._sounding = item.response_id
                self._on_playback(Playback("started", item.response_id))
        if part:
            item.end = position + len(part) // self._sample_len
        return part

    def _last_mark(self, now_ns: int) -> Frame | None:
        """The end came to be known only after the last sample had left."""
        if self._items and self._all_sent and self._has_marks and self._marked < self._sent:
            return Frame(b"", self._new_mark())
        self.retire(now_ns)
        return None

    def _new_mark(self) -> str | None:
        if not self._has_marks:
            return None
        self._marked = self._sent
        name = f"parley-{self._sent}"
        self._marks.append((name, self._sent))
        return name
