"""Interruptions: what stops the answer, what does not, and what is left of it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from app.conversation.events import (
    InputCommitted,
    Item,
    ItemTruncated,
    OutputAudio,
    OutputDone,
    PlaybackCut,
    ResponseDone,
    ResponseStarted,
    SpeechStarted,
    SpeechStopped,
)
from app.conversation.session_config import TurnDetection
from app.errors import ClientError
from audio.codecs import PCM16_24K, decode
from audio.endpointing.backchannel import is_backchannel, is_echo_of
from llm_core import ChatMessage
from tests.support.fakes import ScriptedEngine, ToneSynthesizer, recent, silence, voice
from tests.support.session_call import Call, call

SEMANTIC = TurnDetection(kind="semantic_vad")
LONG = "One two three four five six seven eight nine ten. Eleven twelve thirteen fourteen fifteen."


def semantic(engine: ScriptedEngine, *texts: str, **changes: Any) -> Any:
    return call(engine, *texts, turn_detection=SEMANTIC, **changes)


def num_sent(c: Call) -> int:
    return sum(len(e.audio) // 2 for e in c.out.of(OutputAudio))


@pytest.mark.parametrize(
    "text",
    ["Mhm.", "Yeah.", "Okay.", "uh-huh", "Yeah, okay.", "I see.", "Oh, I see", "", "Right, right."],
)
def test_backchannels(text: str) -> None:
    assert is_backchannel(text)


@pytest.mark.parametrize(
    "text",
    ["Stop.", "Wait", "No.", "Yeah but why?", "I got it all wrong", "okay what is next", "of", "I"],
)
def test_what_is_no_backchannel(text: str) -> None:
    assert not is_backchannel(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Two three four.", True),
        ("three for five six", True),
        ("eleven twelve thirteen", True),
        ("Stop.", False),
        ("two", False),
        ("What about seven apples and my dog", False),
        ("ten nine eight", False),
    ],
)
def test_our_own_words_are_known(text: str, expected: bool) -> None:
    assert is_echo_of(text, LONG) is expected


async def test_our_own_voice_in_the_microphone_does_not_stop_the_answer() -> None:
    async with semantic(ScriptedEngine(LONG), "Count, please.", "Two three four.") as c:
        await c.ask()
        await c.hear(silence(0.5) + voice(0.4) + silence(0.5))
        await c.clock.advance(30)
        assert [e.response.status for e in c.out.of(ResponseDone)] == ["completed"]


async def test_mhm_does_not_stop_the_answer_and_loses_no_sample() -> None:
    # Pitfall 20 (livekit#4039): "mhm" in mid-reply, and the bot never goes on.
    async with semantic(ScriptedEngine(LONG), "Count, please.", "Mhm.") as c:
        await c.ask()
        await c.hear(silence(0.5))
        await c.hear(voice(0.3))
        before = num_sent(c)
        await c.hear(silence(0.4))
        await c.clock.advance(30)
        assert [e.response.status for e in c.out.of(ResponseDone)] == ["completed"]
        assert c.messages() == [
            ChatMessage("user", "Count, please."),
            ChatMessage("assistant", LONG),
        ]
        assert len(c.out.of(InputCommitted)) == 1, "mhm is no turn"
        assert len(c.out.of(SpeechStarted)) == len(c.out.of(SpeechStopped)) == 2
        turn = recent(c.services.traces.store, 1)[0]
        assert turn["facts"]["holds"] == 1
        # What the player threw away was sent again: less than the lead, and never less than that.
        whole = 1_000 * sum(len(t.strip()) for t in c.synthesizer.spoken)
        assert whole < num_sent(c) <= whole + 24_000 * 1.1
        assert before < num_sent(c)


async def test_the_answer_goes_on_at_the_sample_where_it_stopped() -> None:
    class Ramp(ToneSynthesizer):
        """A voice whose samples say where they are."""

        def __init__(self) -> None:
            super().__init__()
            self.at = 0

        def synthesize(self, text: str, *, speed: float = 1.0) -> Any:
            n = 1_000 * len(text.strip())
            self.at += n
            return (np.arange(self.at - n, self.at) % 16_000 + 200).astype(np.float32) / 32_768

    async with semantic(ScriptedEngine(LONG), "Count, please.", "Mhm.") as c:
        object.__setattr__(c.services, "synthesizer", Ramp())
        await c.ask()
        await c.hear(silence(0.7) + voice(0.3) + silence(0.4))
        await c.clock.advance(30)
        heard = [decode(e.audio, PCM16_24K) for e in c.out.of(OutputAudio)]
        stream = np.round(np.concatenate(heard) * 32_768).astype(int) - 200
        jumps = np.flatnonzero(np.diff(stream) % 16_000 != 1)
        assert len(jumps) == 1, "one place where it goes back, everywhere else sample by sample"
        back = (stream[jumps[0]] + 1 - stream[jumps[0] + 1]) % 16_000
        assert 0 < back <= 24_000 * 1.1


async def until_sent(c: Call) -> None:
    """Listen until the answer is sent whole; its end is still being heard."""
    while not c.out.of(ResponseDone):
        await c.hear(silence(0.02))
    assert c.session._responses.last is not None and c.session._responses.last.is_playing


async def test_mhm_over_the_end_of_an_answer_is_no_turn_and_cuts_nothing() -> None:
    async with semantic(ScriptedEngine(LONG, "never"), "Count, please.", "Mhm.") as c:
        await c.ask()
        await until_sent(c)
        num_cuts = len(c.out.of(PlaybackCut))
        await c.hear(voice(0.3) + silence(0.5))
        await c.clock.advance(10)
        assert len(c.out.of(PlaybackCut)) == num_cuts
        assert len(c.out.of(InputCommitted)) == len(c.out.of(ResponseDone)) == 1
        assert len(c.out.of(SpeechStarted)) == len(c.out.of(SpeechStopped)) == 2
        assert c.messages()[-1].content == LONG


async def test_words_over_the_end_of_an_answer_stop_it() -> None:
    async with semantic(ScriptedEngine(LONG, "Fine."), "Count, please.", "Stop it now.") as c:
        await c.ask()
        await until_sent(c)
        num_cuts = len(c.out.of(PlaybackCut))
        await c.hear(voice(0.4) + silence(0.3))
        assert len(c.out.of(PlaybackCut)) == num_cuts + 1
        await c.hear(silence(0.5))
        await c.clock.advance(10)
        assert [m.content for m in c.messages()][2:] == ["Stop it now.", "Fine."]
        assert LONG.startswith(c.messages()[1].content) and c.messages()[1].content != LONG


async def test_a_long_voice_over_the_end_stops_it_before_its_words_are_known() -> None:
    async with semantic(ScriptedEngine(LONG, "Fine."), "Count, please.", "Yes yes.") as c:
        await c.ask()
        await until_sent(c)
        num_cuts = len(c.out.of(PlaybackCut))
        await c.hear(voice(0.85))
        assert len(c.out.of(PlaybackCut)) == num_cuts + 1


async def test_yes_over_the_end_of_a_question_is_an_answer() -> None:
    question = "One two three four five six seven eight nine ten. Shall I go on counting for you?"
    engine = ScriptedEngine(question, "Eleven.")
    async with semantic(engine, "Count, please.", "Yeah.") as c:
        await c.ask()
        await until_sent(c)
        await c.hear(voice(0.3) + silence(1.0))
        await c.clock.advance(10)
        assert [m.content for m in c.messages()][2:] == ["Yeah.", "Eleven."]


async def test_stop_stops_and_a_second_mhm_does_not() -> None:
    engine = ScriptedEngine(LONG, "Fine.")
    async with semantic(engine, "Count, please.", "Mhm.", "Stop it now.") as c:
        await c.ask()
        await c.hear(silence(0.5) + voice(0.3) + silence(0.5))
        assert c.out.of(ResponseDone) == []
        await c.hear(voice(0.5) + silence(0.2))
        assert [e.response.reason for e in c.out.of(ResponseDone)] == ["turn_detected"]
        await c.hear(silence(0.8))
        await c.clock.advance(10)
        assert [m.content for m in c.messages()][2:] == ["Stop it now.", "Fine."]
        assert LONG.startswith(c.messages()[1].content)


async def test_no_sample_leaves_while_the_answer_is_held() -> None:
    async with semantic(ScriptedEngine(LONG), "Count, please.", "Stop it now.") as c:
        await c.ask()
        await c.hear(silence(0.5))
        onset = c.clock.now_ns()
        while len(c.out.of(SpeechStarted)) < 2:
            await c.hear(voice(0.02))
        assert (c.clock.now_ns() - onset) / 1e6 <= 300
        sent = num_sent(c)
        await c.hear(voice(0.8))
        assert num_sent(c) == sent


async def test_a_long_voice_without_known_words_is_meant() -> None:
    async with semantic(ScriptedEngine(LONG), "Count, please.", "Mhm.") as c:
        await c.ask()
        await c.hear(silence(0.5) + voice(2.0))
        assert [e.response.status for e in c.out.of(ResponseDone)] == ["cancelled"]


async def test_clear_releases_a_held_answer() -> None:
    async with semantic(ScriptedEngine(LONG), "Count, please.") as c:
        await c.ask()
        await c.hear(silence(0.5) + voice(0.3))
        await c.session.clear_audio()
        await c.clock.advance(30)
        assert [e.response.status for e in c.out.of(ResponseDone)] == ["completed"]
        assert c.messages()[1].content == LONG


async def test_a_client_that_cuts_while_held_gets_all_of_it_back() -> None:
    async with semantic(ScriptedEngine(LONG), "Count, please.", "Mhm.") as c:
        await c.ask()
        await c.hear(silence(0.5) + voice(0.2))
        item = c.out.of(ResponseStarted)[0].response.output[0]
        await c.session.truncate_item(item.id, 0, 100)
        await c.hear(silence(0.5))
        await c.clock.advance(30)
        assert c.messages()[1].content == LONG
        assert item.status == "completed"


async def test_interrupt_response_false_lets_the_answer_finish() -> None:
    patient = TurnDetection(kind="semantic_vad", interrupt_response=False)
    async with call(
        ScriptedEngine(LONG, "Yes."), "Count, please.", "And now?", turn_detection=patient
    ) as c:
        await c.ask()
        await c.hear(silence(0.5) + voice(0.5) + silence(1.5))
        await c.clock.advance(30)
        assert [e.response.status for e in c.out.of(ResponseDone)] == ["completed", "completed"]
        assert [m.content for m in c.messages()] == ["Count, please.", LONG, "And now?", "Yes."]


async def test_server_vad_is_obeyed_to_the_letter() -> None:
    async with call(ScriptedEngine(LONG, "What?"), "Count, please.", "Mhm.") as c:
        await c.ask()
        await c.hear(silence(0.5) + voice(0.3))
        assert [e.response.reason for e in c.out.of(ResponseDone)] == ["turn_detected"]


async def test_counting_interrupted_after_five_keeps_what_was_said_once() -> None:
    # Pitfall 20 (pipecat#2791, livekit#2094).
    async with semantic(ScriptedEngine(LONG, "Yes."), "Count, please.", "Stop right there.") as c:
        await c.ask()
        await c.hear(silence(0.9) + voice(0.6) + silence(1.0))
        await c.clock.advance(10)
        said = [m.content for m in c.messages() if m.role == "assistant"]
        assert said[0] and LONG.startswith(said[0]) and said[0] != LONG
        assert said[1:] == ["Yes."]


@pytest.mark.parametrize("seed", range(200))
async def test_history_holds_what_the_recording_holds(seed: int) -> None:
    """200 random points: the words of the history are those whose sound was played to its end."""
    rng = random.Random(seed)
    kind = rng.choice(("server_vad", "semantic_vad"))
    lead_ms = rng.choice((60, 200, 1_000))
    async with call(
        ScriptedEngine(LONG, "Yes."),
        "Count, please.",
        "Stop right there.",
        turn_detection=TurnDetection(kind=kind),  # type: ignore[arg-type]
        settings={"playout_lead_ms": lead_ms},
    ) as c:
        player = Player(c)
        await c.ask()
        # Sooner, whoever speaks goes on with the turn: there is no answer then to be cut.
        await c.hear(silence(rng.uniform(0.02 if kind == "server_vad" else 0.6, 2.0)))
        await c.hear(voice(0.6))
        played = player.num_played
        await c.hear(silence(1.0))
        await c.clock.advance(20)
        history = [m.content for m in c.messages() if m.role == "assistant"][0]
        assert history == player.words_in(played)


class Player:
    """What a client plays: on arrival, without a break, and nothing more once the caller speaks."""

    def __init__(self, c: Call) -> None:
        self._clock = c.clock
        self._starts_ns: list[int] = []
        self._lens: list[int] = []
        self._silent_at: int | None = None
        self._spoken = c.synthesizer.spoken
        self._is_answered = False
        record = c.sink

        async def sink(event: Any) -> None:
            now = c.clock.now_ns()
            if isinstance(event, OutputAudio) and self._silent_at is None:
                ends = self._starts_ns[-1] + self._ns(self._lens[-1]) if self._lens else now
                self._starts_ns.append(max(now, ends))
                self._lens.append(len(event.audio) // 2)
            if isinstance(event, SpeechStarted) and self._lens:
                self._silent_at = self._silent_at or now
            await record(event)

        c.sink = sink

    @staticmethod
    def _ns(num_samples: int) -> int:
        return num_samples * 1_000_000_000 // 24_000

    @property
    def num_played(self) -> int:
        at = self._silent_at or self._clock.now_ns()
        played = 0
        for start, length in zip(self._starts_ns, self._lens, strict=True):
            played += min(length, max(0, (at - start) * 24_000 // 1_000_000_000))
        return played

    def words_in(self, num_samples: int) -> str:
        """The tone's words: each clause has 1,000 samples a character, shared by its words."""
        from audio.playout import PlayoutTimeline

        timeline = PlayoutTimeline()
        at = 0
        for clause in self._spoken:
            begin = LONG.index(clause.strip(), at)
            end = begin + len(clause.strip())
            while end < len(LONG) and LONG[end] == " ":
                end += 1
            if begin >= len(LONG):
                break
            timeline.append(LONG[begin:end], 1_000 * len(clause.strip()))
            at = end
            if at >= len(LONG):
                break
        return timeline.heard_text(num_samples).strip()


def received_ms(c: Call, item_id: str) -> int:
    """Audio that a client got for an item, counted as stock clients count it."""
    return sum(len(e.audio) // 2 for e in c.out.of(OutputAudio) if e.item_id == item_id) // 24


async def interrupted(c: Call, speech_s: float) -> Item:
    """An answer is spoken, and a voice of ``speech_s`` lies over it."""
    await c.ask()
    await c.hear(silence(0.5) + voice(speech_s))
    return c.out.of(ResponseStarted)[0].response.output[0]


@pytest.mark.parametrize("speech_s", [0.12, 0.2, 0.6, 1.5], ids=["held", "held", "cut", "answered"])
async def test_a_client_may_truncate_anywhere_in_what_it_received(speech_s: float) -> None:
    """Stock clients truncate at every voice, at the position that their player had."""
    async with semantic(ScriptedEngine(LONG, "Sure."), "Count, please.", "Stop.") as c:
        item = await interrupted(c, speech_s)
        received = received_ms(c, item.id)
        for audio_end_ms in (received, received - 100, received - 100, 300, received, 0):
            await c.session.truncate_item(item.id, 0, audio_end_ms)
            told = c.out.of(ItemTruncated)[-1]
            assert (told.item_id, told.audio_end_ms) == (item.id, audio_end_ms)
            assert item.content[0].audio_ms == audio_end_ms
        with pytest.raises(ClientError, match=rf"of {received}ms is already shorter than"):
            await c.session.truncate_item(item.id, 0, received + 1)


async def test_a_client_that_heard_more_than_the_server_believed_extends_the_history() -> None:
    async with semantic(ScriptedEngine(LONG, "Sure."), "Count, please.", "Stop.") as c:
        item = await interrupted(c, 1.5)
        believed = c.messages()[1].content
        await c.session.truncate_item(item.id, 0, received_ms(c, item.id))
        heard = c.messages()[1].content
        assert heard.startswith(believed) and len(heard) > len(believed)
        assert LONG.startswith(heard)


async def test_audio_that_was_sent_again_after_a_pause_counts_as_received() -> None:
    async with semantic(ScriptedEngine(LONG), "Count, please.", "Mhm.") as c:
        item = await interrupted(c, 0.2)
        await c.hear(silence(0.6))
        await c.clock.advance(30)
        received = received_ms(c, item.id)
        assert received > c.out.of(OutputDone)[0].item.content[0].audio_ms, "some came twice"
        await c.session.truncate_item(item.id, 0, received)
        assert c.messages()[1].content == LONG, "all of it was heard"


async def test_items_of_earlier_answers_may_be_truncated() -> None:
    async with semantic(ScriptedEngine(LONG, "Sure."), "Count, please.", "Stop.") as c:
        item = await interrupted(c, 1.5)
        await c.hear(silence(1.5))
        await c.clock.advance(5)
        assert len(c.out.of(ResponseDone)) == 2
        await c.session.truncate_item(item.id, 0, received_ms(c, item.id))
        assert c.out.of(ItemTruncated)[-1].item_id == item.id


async def test_where_the_transport_plays_a_client_cannot_extend_what_was_heard() -> None:
    async with semantic(ScriptedEngine(LONG, "Sure."), "Count, please.", "Stop.") as c:
        item = await interrupted(c, 1.5)
        heard_ms = item.content[0].audio_ms
        received = received_ms(c, item.id)
        await c.session.truncate_item(item.id, 0, received, may_extend=False)
        assert item.content[0].audio_ms == heard_ms < received
        await c.session.truncate_item(item.id, 0, 200, may_extend=False)
        assert item.content[0].audio_ms == 200
