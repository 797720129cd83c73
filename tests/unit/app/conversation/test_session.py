"""A whole conversation with stand-ins for the models and a clock that the test moves."""

from __future__ import annotations

import pytest

from app.conversation.events import (
    InputCommitted,
    Item,
    OutputAudio,
    OutputDone,
    OutputText,
    Part,
    ResponseDone,
    ResponseStarted,
    SpeechStarted,
    SpeechStopped,
    TranscriptionCompleted,
    TurnTraced,
)
from app.conversation.response.spec import ResponseRequest
from app.conversation.session_config import TurnDetection
from app.conversation.turn_taking import Phase
from app.errors import ClientError
from llm_core import ChatMessage, EngineDiedError
from tests.support.fakes import ScriptedEngine, silence, voice
from tests.support.session_call import call


async def test_a_spoken_question_gets_a_spoken_answer() -> None:
    async with call(ScriptedEngine("Fine, thank you."), "How are you?") as c:
        await c.ask()
        await c.clock.advance(5)
        assert [n for n in c.out.names() if n != "OutputAudio"] == [
            "SpeechStarted",
            "SpeechStopped",
            "InputCommitted",
            "ItemAdded",
            "ItemDone",
            "TranscriptionDelta",
            "TranscriptionCompleted",
            "ResponseStarted",
            "OutputStarted",
            *["OutputText"] * len(c.out.of(OutputText)),
            "OutputDone",
            "ResponseDone",
            "TurnTraced",
        ]
        assert c.out.of(ResponseDone)[0].response.status == "completed"
        assert c.messages() == [
            ChatMessage("user", "How are you?"),
            ChatMessage("assistant", "Fine, thank you."),
        ]
        assert "".join(e.text for e in c.out.of(OutputText)) == "Fine, thank you."
        assert c.session._dialog.phase is Phase.LISTENING


async def test_voice_to_voice_is_the_sum_of_its_parts_and_of_the_silence() -> None:
    async with call(ScriptedEngine("Fine, thank you."), "How are you?") as c:
        await c.ask()
        await c.clock.advance(5)
        turn = c.out.of(TurnTraced)[0].turn
        assert turn["outcome"] == "answered"
        assert sum(turn["stages_ms"].values()) == pytest.approx(turn["voice_to_voice_ms"])
        # Only the wait for silence takes time here: 500 ms, rounded up to windows and chunks.
        assert 500 <= turn["voice_to_voice_ms"] <= 560
        assert turn["stages_ms"]["asr"] == 0, "the early transcript was there in time"


async def test_the_answer_is_begun_early_and_held() -> None:
    async with call(ScriptedEngine("Yes."), "Is it late?") as c:
        await c.hear(voice(0.6) + silence(0.3))
        assert len(c.recognizer.heard_s) == 1
        assert c.engine.requests == [
            [ChatMessage("system", "Be brief."), ChatMessage("user", "Is it late?")]
        ]
        assert c.synthesizer.spoken == ["Yes."], "the first clause has its audio already"
        assert c.out.names() == ["SpeechStarted"], "and nobody hears of it"
        assert c.messages() == []
        await c.hear(silence(0.4))
        assert len(c.recognizer.heard_s) == 1, "nothing was voiced since: no second pass"
        assert len(c.engine.requests) == 1, "nor a second answer"
        await c.clock.advance(3)
        assert [m.content for m in c.messages()] == ["Is it late?", "Yes."]
        turn = c.out.of(TurnTraced)[0].turn
        assert {turn["stages_ms"][s] for s in ("asr", "queue", "prefill", "decode", "tts")} == {0}
        assert turn["facts"]["wasted_answers"] == 0


async def test_an_answer_to_half_a_question_is_never_heard() -> None:
    engine = ScriptedEngine("To which half?", "A cat.")
    async with call(engine, "Should I get", "Should I get a cat?") as c:
        await c.hear(voice(0.5) + silence(0.35))
        assert engine.num_running <= 1 and len(engine.requests) == 1
        await c.hear(voice(0.5))
        assert engine.num_running == 0
        await c.hear(silence(0.8))
        await c.clock.advance(3)
        assert [m.content for m in c.messages()] == ["Should I get a cat?", "A cat."]
        facts = c.out.of(TurnTraced)[0].turn["facts"]
        assert (facts["wasted_answers"], facts["wasted_tokens"]) == (1, 3)


async def test_an_early_answer_to_what_is_no_longer_so_is_made_again() -> None:
    engine = ScriptedEngine("Old.", "New.")
    async with call(engine, "And now?") as c:
        await c.hear(voice(0.5) + silence(0.3))
        await c.session.add_item(Item("item_1", "user", [Part("input_text", "It is raining.")]))
        await c.hear(silence(0.5))
        await c.clock.advance(3)
        assert [m.content for m in c.messages()] == ["It is raining.", "And now?", "New."]


async def test_an_early_answer_that_failed_is_tried_again() -> None:
    engine = ScriptedEngine("never said", "Yes.")
    async with call(engine, "Is it late?") as c:
        engine.error = EngineDiedError("the engine process ended")
        await c.hear(voice(0.6) + silence(0.3))
        engine.error = None
        await c.hear(silence(0.4))
        await c.clock.advance(3)
        assert c.out.of(ResponseDone)[0].response.status == "completed"
        assert c.messages()[-1].content == "Yes."


async def test_eager_replies_can_be_turned_off() -> None:
    async with call(ScriptedEngine("Yes."), "Is it?", settings={"eager_reply": False}) as c:
        await c.hear(voice(0.6) + silence(0.3))
        assert c.engine.requests == []
        assert c.engine.prefills[-1][-1] == ChatMessage("user", "Is it?"), "but it is read"
        await c.hear(silence(0.4))
        await c.clock.advance(3)
        assert c.messages()[-1].content == "Yes."


async def test_going_on_after_a_pause_makes_one_turn() -> None:
    async with call(ScriptedEngine("A cat."), "Should I get", "Should I get a cat?") as c:
        await c.hear(voice(0.5) + silence(0.35) + voice(0.5) + silence(0.8))
        await c.clock.advance(3)
        completed = c.out.of(TranscriptionCompleted)
        assert [e.transcript for e in completed] == ["Should I get a cat?"]
        assert c.recognizer.heard_s[1] > 1.3, "the second pass hears the whole turn"


async def test_the_transcribed_audio_begins_before_the_voice() -> None:
    async with call(ScriptedEngine("Yes."), "Hello?") as c:
        await c.hear(silence(2) + voice(0.6) + silence(0.7))
        started = c.out.of(SpeechStarted)[0]
        assert 1_650 <= started.audio_start_ms <= 1_750, "2 s less 300 ms of padding"
        assert 0.9 <= c.recognizer.heard_s[0] <= 1.3
        stopped = c.out.of(SpeechStopped)[0]
        assert 2_550 <= stopped.audio_end_ms <= 2_700
        assert stopped.item_id == started.item_id == c.out.of(InputCommitted)[0].item_id


async def test_silence_and_noise_say_nothing() -> None:
    async with call(ScriptedEngine(), "") as c:
        await c.ask()
        assert [e.transcript for e in c.out.of(TranscriptionCompleted)] == [""]
        assert c.out.of(ResponseStarted) == []
        assert c.messages() == []


async def test_a_typed_question_is_spoken_or_written() -> None:
    async with call(ScriptedEngine("Four.", "Five.")) as c:
        await c.session.add_item(Item("item_1", "user", [Part("input_text", "2 + 2?")]))
        await c.session.create_response()
        await c.clock.advance(3)
        assert c.out.of(OutputAudio)
        c.out.events.clear()
        await c.session.create_response(ResponseRequest(modality="text"))
        await c.clock.advance(1)
        assert not c.out.of(OutputAudio)
        item = c.out.of(OutputDone)[0].item
        assert (item.content[0].type, item.content[0].text) == ("output_text", "Five.")
        assert c.out.of(TurnTraced)[0].turn["voice_to_voice_ms"] is None


LONG = "One two three four five six seven eight nine ten, eleven twelve thirteen fourteen fifteen."


@pytest.mark.parametrize("after_s", [0.05, 0.3, 1.0, 2.0, 2.9, 3.3])
async def test_an_interruption_keeps_what_was_heard(after_s: float) -> None:
    async with call(ScriptedEngine(LONG, "Sure."), "Count.", "Stop.") as c:
        await c.ask()
        await c.clock.advance(after_s)
        await c.ask()
        await c.clock.advance(2)
        first, second = [e.response for e in c.out.of(ResponseDone)]
        # Sent ahead by the lead of a second: what ends within it is done, but not yet heard.
        all_sent = after_s > len(LONG) * 1_000 / 24_000 - 1
        assert first.status == ("completed" if all_sent else "cancelled")
        assert second.status == "completed"
        user, cut, *_ = c.messages()
        heard = cut.content if cut.role == "assistant" else ""
        assert LONG.startswith(heard) and heard != LONG
        # The voice began `after_s` plus its detection time after the first audio: 24 samples a
        # millisecond, 1,000 samples a letter, so about a letter in 42 ms.
        letters = (after_s + 0.15) * 24
        assert letters - 14 <= len(heard) <= letters + 6
        outcome = c.out.of(TurnTraced)[0].turn["outcome"]
        assert outcome == ("answered" if all_sent else "interrupted")


async def test_no_audio_leaves_after_the_callers_voice() -> None:
    async with call(ScriptedEngine(LONG, "Sure."), "Count.", "Stop.") as c:
        await c.ask()
        await c.clock.advance(1)
        await c.hear(voice(0.5))
        names = c.out.names()
        announced = len(names) - 1 - names[::-1].index("SpeechStarted")
        assert "OutputAudio" not in names[announced:]
        assert names[announced + 1 :] == ["PlaybackCut", "OutputDone", "ResponseDone", "TurnTraced"]
        await c.hear(silence(0.7))


async def test_voice_after_all_was_sent_cuts_what_still_plays() -> None:
    async with call(ScriptedEngine("Twenty letters here.", "Sure."), "Go.", "Stop.") as c:
        await c.ask()
        await c.clock.advance(0.1)
        assert c.out.of(ResponseDone), "20,000 samples fit into the lead: all is sent"
        await c.ask(speech_s=0.3)
        heard = c.messages()[1].content
        assert heard != "Twenty letters here." and "Twenty letters here.".startswith(heard)


async def test_truncate_tells_better_than_the_clock() -> None:
    async with call(ScriptedEngine("Twenty letters here.")) as c:
        await c.session.create_response()
        await c.clock.advance(3)
        item = c.out.of(OutputDone)[0].item
        with pytest.raises(ClientError, match="already shorter than 9000ms"):
            await c.session.truncate_item(item.id, 0, 9_000)
        await c.session.truncate_item(item.id, 0, 400)
        assert c.messages()[0].content.strip() == "Twenty"
        await c.session.truncate_item(item.id, 0, 0)
        assert c.messages() == []


async def test_uninterruptible_answers_go_on_and_the_turn_is_answered_next() -> None:
    detection = TurnDetection(interrupt_response=False)
    engine = ScriptedEngine(LONG, "Sure.")
    async with call(engine, "Count.", "And now?", turn_detection=detection) as c:
        await c.ask()
        await c.ask()
        await c.clock.advance(10)
        assert [e.response.status for e in c.out.of(ResponseDone)] == ["completed", "completed"]
        assert [m.content for m in c.messages()] == ["Count.", LONG, "And now?", "Sure."]


async def test_manual_commit_then_response() -> None:
    async with call(ScriptedEngine("Yes."), "Ready?", turn_detection=None) as c:
        with pytest.raises(ClientError) as refused:
            await c.session.commit_audio()
        assert refused.value.code == "input_audio_buffer_commit_empty"
        await c.hear(voice(0.5) + silence(1))
        assert c.out.events == [], "without turn detection nothing happens by itself"
        await c.session.commit_audio()
        await c.session.create_response()
        await c.clock.advance(3)
        assert [m.content for m in c.messages()] == ["Ready?", "Yes."]
        turn = c.out.of(TurnTraced)[0].turn
        assert turn["stages_ms"]["endpoint"] == pytest.approx(1_000, abs=60)


async def test_clear_forgets_the_voice() -> None:
    async with call(ScriptedEngine(), "never") as c:
        await c.hear(voice(0.5))
        await c.session.clear_audio()
        await c.hear(silence(2))
        assert c.out.names() == ["SpeechStarted", "InputCleared"]
        assert c.session._dialog.phase is Phase.LISTENING
