"""What was heard on a phone: by marks, by the clock, and after a clear. Time is an argument."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from app.transports.audio_port import Cut, Playback
from app.transports.telephony.playout import Frame, PhonePlayout
from app.transports.telephony.reorder_buffer import MAX_HELD, InOrder, Missing
from audio.codecs import PCMU_8K, AudioFormat

MS = 1_000_000


class Phone:
    """A playout, and a clock in ms."""

    def __init__(
        self, fmt: AudioFormat = PCMU_8K, *, lead_ms: int = 200, has_marks: bool = True
    ) -> None:
        self.told: list[Playback] = []
        self.now_ms = 1_000
        self.playout = PhonePlayout(
            fmt, frame_ms=20, lead_ms=lead_ms, has_marks=has_marks, on_playback=self.told.append
        )

    def take(self) -> list[Frame]:
        frames = []
        while (frame := self.playout.next_frame(self.now_ms * MS)) is not None:
            frames.append(frame)
        return frames

    def marks(self, frames: list[Frame]) -> list[str]:
        return [frame.mark for frame in frames if frame.mark is not None]

    def reached(self, mark: str) -> None:
        self.playout.reached(mark, self.now_ms * MS)

    def clear(self) -> Cut | None:
        return self.playout.clear(self.now_ms * MS)


def test_audio_leaves_in_whole_frames_not_further_ahead_than_the_lead() -> None:
    phone = Phone()
    phone.playout.push("r", "i", bytes(8_000))
    frames = phone.take()
    assert [len(frame.payload) for frame in frames] == [160] * 11  # 200 ms, and the one that plays
    assert phone.take() == []
    assert phone.playout.wait_s(phone.now_ms * MS) == 0.02
    phone.now_ms += 20
    assert len(phone.take()) == 1


def test_a_part_of_a_frame_waits_for_its_rest_and_then_silence_fills_it() -> None:
    phone = Phone()
    phone.playout.push("r", "i", b"\1" * 250)
    assert [frame.payload for frame in phone.take()] == [b"\1" * 160]
    assert phone.playout.wait_s(phone.now_ms * MS) is None, (
        "nothing is to be done before more comes"
    )
    phone.playout.push("r", "i", b"\2" * 20)
    assert phone.take() == []
    phone.playout.finish("r")
    (last,) = phone.take()
    assert last.payload == b"\1" * 90 + b"\2" * 20 + b"\xff" * 50
    assert last.mark is not None, "the end is always asked about"


def test_an_end_that_was_known_too_late_is_asked_about_all_the_same() -> None:
    phone = Phone()
    phone.playout.push("r", "i", bytes(160))
    assert phone.marks(phone.take()) == []
    phone.playout.finish("r")
    (frame,) = phone.take()
    assert frame.payload == b"" and frame.mark is not None
    phone.now_ms += 20
    phone.reached(frame.mark)
    assert phone.told == [Playback("started", "r"), Playback("stopped", "r")]
    assert phone.playout.is_idle


def test_marks_say_what_was_heard_and_the_clock_only_between_them() -> None:
    phone = Phone(lead_ms=1_000)
    phone.playout.push("r", "i", bytes(8_000))
    first, second, *_ = phone.marks(phone.take())
    phone.now_ms += 500  # the provider took its time
    assert phone.playout.heard(phone.now_ms * MS) == 0
    phone.reached(first)
    assert phone.playout.heard(phone.now_ms * MS) == 800
    phone.now_ms += 40
    assert phone.playout.heard(phone.now_ms * MS) == 800 + 320
    phone.now_ms += 400
    assert phone.playout.heard(phone.now_ms * MS) == 1_600, "not beyond what is not confirmed"
    phone.reached(second)
    assert phone.clear() == Cut("r", "i", 200)


def test_marks_that_come_after_a_clear_were_not_heard() -> None:
    phone = Phone(lead_ms=1_000)
    phone.playout.push("r", "i", bytes(8_000))
    marks = phone.marks(phone.take())
    phone.now_ms += 100
    phone.reached(marks[0])
    assert phone.clear() == Cut("r", "i", 100)
    before = phone.playout.heard(phone.now_ms * MS)
    phone.playout.push("r2", "i2", bytes(8_000))
    new = phone.marks(phone.take())
    for mark in marks[1:]:  # the provider gives all back at once
        phone.reached(mark)
    assert phone.playout.heard(phone.now_ms * MS) == before
    phone.now_ms += 100
    phone.reached(new[0])
    assert phone.clear() == Cut("r2", "i2", 100)
    assert phone.told == [Playback("started", "r"), Playback("started", "r2")]


def test_an_interruption_after_all_was_sent_still_cuts() -> None:
    phone = Phone(lead_ms=5_000)
    phone.playout.push("r", "i", bytes(8_000))
    phone.playout.finish("r")
    marks = phone.marks(phone.take())
    phone.now_ms += 300
    for mark in marks[:3]:
        phone.reached(mark)
    assert phone.clear() == Cut("r", "i", 300)
    assert phone.clear() is None


def test_a_mark_that_never_comes_back_does_not_hold_the_call() -> None:
    phone = Phone()
    phone.playout.push("r", "i", bytes(320))
    phone.playout.finish("r")
    phone.take()
    wait_s = phone.playout.wait_s(phone.now_ms * MS)
    assert wait_s is not None and 3.0 <= wait_s <= 3.1
    phone.now_ms += round(wait_s * 1000) + 1
    assert phone.take() == []
    assert phone.playout.is_idle
    assert phone.told[-1] == Playback("stopped", "r")


def test_without_marks_the_clock_says_what_was_heard() -> None:
    phone = Phone(AudioFormat("pcm16", 8_000), lead_ms=20, has_marks=False)
    phone.playout.push("r", "i", bytes(16_000))
    assert len(phone.take()) == 2
    for _ in range(10):
        phone.now_ms += 20
        assert len(phone.take()) == 1, "20 ms every 20 ms"
    assert phone.clear() == Cut("r", "i", 200)


def test_items_of_a_response_make_one_sound() -> None:
    phone = Phone(has_marks=False)
    phone.playout.push("r", "a", bytes(240))
    phone.playout.push("r", "b", bytes(240))
    phone.playout.finish("r")
    assert [len(f.payload) for f in phone.take()] == [160, 160, 160]
    phone.now_ms += 100
    phone.take()
    assert phone.told == [Playback("started", "r"), Playback("stopped", "r")]


steps = st.one_of(
    st.tuples(st.just("push"), st.integers(1, 4_000)),
    st.tuples(st.just("finish"), st.just(0)),
    st.tuples(st.just("clear"), st.just(0)),
    st.tuples(st.just("time"), st.integers(1, 500)),
    st.tuples(st.just("mark"), st.integers(0, 5)),
)


@given(st.lists(steps, max_size=40), st.booleans())
@settings(deadline=None)
def test_whatever_happens_heard_only_grows_and_nothing_spins(
    todo: list[tuple[str, int]], has_marks: bool
) -> None:
    phone = Phone(has_marks=has_marks)
    marks: list[str] = []
    number, heard, sent = 0, 0, 0
    for name, value in todo:
        match name:
            case "push":
                phone.playout.push(f"r{number}", f"i{number}", bytes(value))
            case "finish":
                phone.playout.finish(f"r{number}")
                number += 1
            case "clear":
                cut = phone.clear()
                assert cut is None or cut.heard_ms >= 0
                number += 1
                heard = sent
            case "time":
                phone.now_ms += value
            case "mark" if marks:
                phone.reached(marks[min(value, len(marks) - 1)])
        frames = phone.take()
        assert all(len(frame.payload) in (0, 160) for frame in frames)
        sent += sum(len(frame.payload) for frame in frames)
        marks += phone.marks(frames)
        assert phone.playout.wait_s(phone.now_ms * MS) != 0, "a writer would never sleep"
        now_heard = phone.playout.heard(phone.now_ms * MS)
        assert heard <= now_heard <= sent
        heard = now_heard
    phone.playout.finish(f"r{number}")
    for _ in range(2_000):
        phone.take()
        phone.now_ms += 20
    assert phone.playout.is_idle, "everything ends"


def test_chunks_in_order_leave_at_once_and_late_ones_find_their_place() -> None:
    order = InOrder()
    assert order.feed(1, b"a") == [b"a"]
    assert order.feed(3, b"c") == []
    assert order.feed(2, b"b") == [b"b", b"c"]
    assert order.feed(2, b"b") == [], "twice"
    assert order.feed(None, b"x") == [b"x"]


def test_a_hole_is_waited_for_and_then_named() -> None:
    order = InOrder()
    order.feed(1, b"a")
    out = [order.feed(n, bytes([n])) for n in range(4, 4 + MAX_HELD + 1)]
    assert out[:-1] == [[]] * MAX_HELD
    assert out[-1] == [Missing(2), *(bytes([n]) for n in range(4, 8))]
    assert order.feed(2, b"b") == [], "too late"


def test_a_jump_is_a_new_stream() -> None:
    order = InOrder()
    order.feed(1, b"a")
    order.feed(3, b"c")
    assert order.feed(100_000, b"z") == [b"c", b"z"]
    assert order.feed(5, b"e") == [b"e"]


@given(st.permutations(range(4)), st.sets(st.integers(1, 59)))
def test_every_chunk_leaves_once_in_order_or_is_missing(mix: list[int], lost: set[int]) -> None:
    order = InOrder()
    sent = [block + i for block in range(4, 60, 4) for i in mix]
    out = order.feed(3, bytes([3]))
    for number in sent:
        if number not in lost:
            out += order.feed(number, bytes([number]))
    values = [piece[0] for piece in out if isinstance(piece, bytes)]
    assert values == sorted(set(values))
    if not lost:
        assert values == list(range(3, 60))
    missing = sum(piece.num_pieces for piece in out if isinstance(piece, Missing))
    assert values[-1] - values[0] + 1 == len(values) + missing
