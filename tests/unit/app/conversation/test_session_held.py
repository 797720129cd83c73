"""A held answer that turns out to be the wrong one is never heard."""

from __future__ import annotations

from dataclasses import replace

from app.conversation.events import Item, Part
from llm_core import ChatMessage
from tests.support.fake_engines import ShortContextEngine
from tests.support.fakes import ScriptedEngine, settle, silence, voice
from tests.support.session_call import call


async def test_a_changed_configuration_voids_the_held_answer() -> None:
    engine = ScriptedEngine("Old.", "New.")
    async with call(engine, "And?") as c:
        await c.hear(voice(0.6) + silence(0.3))
        assert engine.requests and c.session._ahead._answer is not None
        await c.session.update(replace(c.session.config, instructions="Be kind."))
        await c.hear(silence(0.4))
        await c.clock.advance(3)
        assert engine.requests[-1][0] == ChatMessage("system", "Be kind.")
        assert [m.content for m in c.messages()] == ["And?", "New."]


async def test_changed_instructions_are_read_before_anybody_speaks() -> None:
    async with call(ScriptedEngine("Yes.")) as c:
        await settle()
        before = len(c.engine.prefills)
        await c.session.update(replace(c.session.config, instructions="Be kind."))
        await settle()
        assert c.engine.prefills[before:] == [[ChatMessage("system", "Be kind.")]]
        await c.session.update(replace(c.session.config, speed=1.5))
        await c.session.update(replace(c.session.config, instructions="Be kind."))
        await settle()
        assert len(c.engine.prefills) == before + 1, "nothing else is to be read"


async def test_instructions_that_are_changed_again_hold_nobody_up() -> None:
    engine = ShortContextEngine(1_000, "Yes.")
    async with call(engine) as c:
        await settle()
        engine.prefill_gate.clear()  # long ones: they are still being read
        await c.session.update(replace(c.session.config, instructions="Be kind."))
        await settle()
        await c.session.update(replace(c.session.config, instructions="Be brief."))
        await settle()
        assert engine.prefills[-1] == [ChatMessage("system", "Be brief.")]


async def test_a_response_asked_for_in_a_pause_replaces_the_held_answer() -> None:
    engine = ScriptedEngine("Held.", "Asked for.", "After all.")
    async with call(engine, "And?", "And?") as c:
        await c.session.add_item(Item("item_1", "user", [Part("input_text", "Hi.")]))
        await c.hear(voice(0.6) + silence(0.3))
        await c.session.create_response()
        await settle()
        assert engine.num_running <= 1 and c.session._ahead._answer is None
        await c.hear(silence(0.4))
        await c.clock.advance(5)
        assert "Held." not in [m.content for m in c.messages()]
