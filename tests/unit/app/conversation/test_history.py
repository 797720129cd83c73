"""What the model reads of a conversation, and what a full one loses."""

from __future__ import annotations

import pytest

from app.conversation import history as history_module
from app.conversation.events import Item, Part, ToolCall, ToolOutput
from app.conversation.history import History
from llm_core import ChatMessage, ToolSpec


def said(item_id: str, role: str, text: str) -> Item:
    return Item(item_id, role, [Part("input_text", text)])  # type: ignore[arg-type]


def made(item_id: str, call_id: str) -> Item:
    return Item(item_id, "assistant", call=ToolCall(call_id, "f", "{}"))


def gave(item_id: str, call_id: str, text: str) -> Item:
    return Item(item_id, "tool", output=ToolOutput(call_id, text))


def shape(history: History) -> list[tuple[str, str, int]]:
    return [(m.role, m.content, len(m.tool_calls)) for m in history.messages("")]


def test_a_call_and_its_output_stand_together_wherever_the_output_is() -> None:
    history = History.of(
        [
            said("1", "user", "a"),
            said("2", "assistant", "b"),
            made("3", "c1"),
            made("4", "c2"),
            said("5", "user", "c"),
            gave("6", "c2", "two"),
            made("7", "c3"),
            gave("8", "c1", "one"),
        ]
    )
    assert shape(history) == [
        ("user", "a", 0),
        ("assistant", "b", 2),
        ("tool", "one", 0),
        ("tool", "two", 0),
        ("user", "c", 0),
    ]
    history.add(gave("9", "c3", "three"))
    assert shape(history)[-2:] == [("assistant", "", 1), ("tool", "three", 0)]


def test_what_is_not_for_the_model_is_not_read() -> None:
    history = History()
    history.append_own(said("1", "assistant", "One moment."), is_for_model=False)
    history.append_own(said("2", "assistant", "Here."))
    assert shape(history) == [("assistant", "Here.", 0)]
    assert history.get("1").content[0].text == "One moment."


def test_tools_stand_on_the_first_message() -> None:
    spec = ToolSpec(name="f")
    history = History.of([said("1", "user", "a")])
    assert history.messages("", (spec,))[0] == ChatMessage("system", "", tools=(spec,))
    assert history.messages("Be kind.", (spec,))[0].tools == (spec,)
    assert history.messages("") == [ChatMessage("user", "a")]


def test_forgetting_takes_a_call_with_its_output() -> None:
    history = History.of(
        [said("1", "user", "a"), made("2", "c"), gave("3", "c", "r"), said("4", "user", "b")]
    )
    history.forget_oldest(history.messages("")[:3])
    assert shape(history) == [("user", "b", 0)]
    history.forget_oldest([])
    assert shape(history) == [("user", "b", 0)]


def test_forgetting_keeps_what_the_system_said_first() -> None:
    history = History.of([said("1", "system", "s"), said("2", "user", "a"), said("3", "user", "b")])
    history.forget_oldest([ChatMessage("user", "a")])
    assert shape(history) == [("system", "s", 0), ("user", "b", 0)]


def test_what_was_deleted_meanwhile_is_not_forgotten_in_its_place() -> None:
    history = History.of([said(str(n), "user", text) for n, text in enumerate("abcd")])
    dropped = history.messages("")[:2]
    history.delete("0")
    history.forget_oldest(dropped)
    assert shape(history) == [("user", "b", 0), ("user", "c", 0), ("user", "d", 0)]


def test_what_a_full_history_loses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MAX_ITEMS", 3)
    history = History()
    for number in range(5):
        history.append_own(said(str(number), "user", "x"))
    assert history.take_evicted() == ["0", "1"]
    assert history.take_evicted() == []
    assert len(history) == 3
