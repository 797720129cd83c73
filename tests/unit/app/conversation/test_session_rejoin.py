"""A caller who goes on after the end of the turn was one turn, not two."""

from __future__ import annotations

import pytest

from app.conversation.events import (
    Item,
    ItemDeleted,
    ItemTruncated,
    OutputAudio,
    Part,
    SpeechStarted,
    ToolCall,
    TranscriptionCompleted,
    TurnTraced,
)
from app.conversation.history import History
from app.conversation.input.merge_turns import mergeable_items
from app.conversation.session_config import TurnDetection
from llm_core import ChatMessage
from tests.support.fakes import ScriptedEngine, silence, voice
from tests.support.session_call import Call, call

SEMANTIC = TurnDetection(kind="semantic_vad", eagerness="high")
HALF, WHOLE = "Go to the bank.", "Go to the bank and ask for cash."
REPLY = "One two three four five six seven eight nine ten, eleven twelve thirteen fourteen."


async def say_half(c: Call, until: type, num: int = 1) -> None:
    """Speak, and be silent until ``until`` was told ``num`` times."""
    await c.hear(voice(0.5))
    for _ in range(60):
        if len(c.out.of(until)) >= num:
            return
        await c.hear(silence(0.02))
    raise AssertionError(f"{until.__name__} did not come")


async def test_going_on_before_the_answer_sounds_leaves_one_message_and_one_answer() -> None:
    engine = ScriptedEngine("Sure.")
    async with call(engine, HALF, WHOLE, turn_detection=SEMANTIC) as c:
        engine.gate.clear()
        await say_half(c, TranscriptionCompleted)
        begun = c.out.of(SpeechStarted)[0]
        await c.hear(voice(0.5))
        engine.gate.set()
        await c.hear(silence(1.0))
        await c.clock.advance(3)
        assert [m.content for m in c.messages()] == [WHOLE, "Sure."]
        first, second = c.out.of(SpeechStarted)
        assert second.audio_start_ms == begun.audio_start_ms, "it is the same turn"
        assert [e.item_id for e in c.out.of(ItemDeleted)] == [first.item_id]
        # The whole turn was heard again: both halves, and the pause between them.
        assert c.recognizer.heard_s[-1] > 1.2
        withdrawn, answered = (e.turn for e in c.out.of(TurnTraced))
        assert (withdrawn["outcome"], answered["outcome"]) == ("withdrawn", "answered")
        assert withdrawn["voice_to_voice_ms"] is None
        assert answered["facts"]["rejoined"] == 1


@pytest.mark.parametrize("word_is_heard", [False, True])
async def test_over_an_answer_it_matters_whether_a_word_was_heard(word_is_heard: bool) -> None:
    # 1,000 samples a letter: the first word is over after 1.3 s or after 0.1 s.
    reply = "So it is then." if word_is_heard else "Extraordinarilyandimmensely good."
    texts = (HALF, "and ask for cash.", WHOLE)
    async with call(ScriptedEngine(reply), *texts, turn_detection=SEMANTIC) as c:
        await say_half(c, OutputAudio)
        await c.hear(silence(0.2))
        item_id = c.out.of(OutputAudio)[0].item_id
        await c.hear(voice(0.5) + silence(1.0))
        # What a client does when its caller speaks, whatever became of the item meanwhile.
        await c.session.truncate_item(item_id, 0, 0)
        await c.clock.advance(3)
        outcome = c.out.of(TurnTraced)[0].turn["outcome"]
        if word_is_heard:
            assert not c.out.of(ItemDeleted) and outcome != "withdrawn"
            assert [m.role for m in c.messages()].count("user") == 2
        else:
            assert [m.content for m in c.messages()] == [WHOLE, reply]
            assert len(c.out.of(ItemDeleted)) == 2 and c.out.of(ItemTruncated)
            assert outcome == "withdrawn"


async def test_under_server_vad_every_silence_ends_a_turn() -> None:
    engine = ScriptedEngine("Sure.")
    async with call(engine, HALF, "And ask for cash.") as c:
        engine.gate.clear()
        await c.hear(voice(0.5) + silence(0.6))
        await c.hear(voice(0.5))
        engine.gate.set()
        await c.hear(silence(1.0))
        await c.clock.advance(3)
        assert [m.content for m in c.messages()] == [HALF, "And ask for cash.", "Sure."]
        assert not c.out.of(ItemDeleted)


async def test_what_the_client_has_added_since_keeps_the_turns_apart() -> None:
    engine = ScriptedEngine("Sure.")
    async with call(engine, HALF, "And ask for cash.", turn_detection=SEMANTIC) as c:
        engine.gate.clear()
        await say_half(c, TranscriptionCompleted)
        await c.session.add_item(Item("mine", "user", [Part("input_text", "Hurry.")]))
        await c.hear(voice(0.5))
        engine.gate.set()
        await c.hear(silence(1.0))
        await c.clock.advance(3)
        assert [m.content for m in c.messages()] == [HALF, "Hurry.", "And ask for cash.", "Sure."]


async def test_a_clap_after_the_end_costs_no_words() -> None:
    engine = ScriptedEngine("Sure.")
    async with call(engine, HALF, HALF, turn_detection=SEMANTIC) as c:
        engine.gate.clear()
        await say_half(c, TranscriptionCompleted)
        await c.hear(voice(0.1))
        engine.gate.set()
        await c.hear(silence(1.0))
        await c.clock.advance(3)
        assert c.messages() == [ChatMessage("user", HALF), ChatMessage("assistant", "Sure.")]


def test_what_a_tool_has_done_is_not_taken_back() -> None:
    class Answer:
        has_been_heard = False

        class response:
            output = [Item("call_1", "assistant", call=ToolCall("call_1", "pay"))]

    class Heard:
        item = Item("said", "user", [Part("input_audio", HALF)])

    history = History.of([Heard.item])
    assert mergeable_items(history, Heard, Answer) == ["said"]  # type: ignore[arg-type]
    history.append_own(Answer.response.output[0])
    assert mergeable_items(history, Heard, Answer) == []  # type: ignore[arg-type]
    assert mergeable_items(history, None, None) == []
