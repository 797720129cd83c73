"""Prompts that are far too long are refused before time is spent on them: all streams wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from llm_core.engine.prompt import PromptBuilder
from llm_core.errors import PromptTooLongError
from llm_core.messages import ChatMessage, ToolCall, ToolSpec

MAX_CONTEXT = 2000


class Counting:
    """A tokenizer and a template at once; counts what was encoded."""

    def __init__(self, chars_a_token: int) -> None:
        self.chars_a_token = chars_a_token
        self.num_chars = 0

    def encode(self, text: str) -> list[int]:
        self.num_chars += len(text)
        return [7] * (1 + len(text) // self.chars_a_token)

    def encode_pieces(self, pieces: Sequence[str]) -> list[int]:
        return [token for piece in pieces for token in self.encode(piece)]

    def render(self, messages: Sequence[ChatMessage]) -> list[str]:
        return [
            part
            for message in messages
            for part in (
                message.content,
                *(call.arguments for call in message.tool_calls),
                *(tool.description for tool in message.tools),
            )
        ]


def builder(counting: Counting) -> PromptBuilder:
    return PromptBuilder(cast(Any, counting), cast(Any, counting), MAX_CONTEXT)


def test_a_text_of_many_tokens_is_not_encoded_to_its_end() -> None:
    counting = Counting(1)
    with pytest.raises(PromptTooLongError, match="more than 2500 tokens"):
        builder(counting).build([ChatMessage("user", "1" * 100_000)], reply_len=10)
    assert counting.num_chars < 10_000


def test_many_messages_are_added_up() -> None:
    counting = Counting(2)
    messages = [ChatMessage("user", "1" * 1000)] * 100
    with pytest.raises(PromptTooLongError, match="more than 2500 tokens"):
        builder(counting).build(messages, reply_len=10)
    assert counting.num_chars < 10_000


def test_a_long_text_of_few_tokens_is_read() -> None:
    prompt = builder(Counting(60)).build([ChatMessage("user", " " * 100_000)], reply_len=10)
    assert len(prompt.token_ids) == 1667


@pytest.mark.parametrize("overflow", ["refuse", "drop_oldest"])
@pytest.mark.parametrize(
    "message",
    [
        ChatMessage("user", "Hi", tools=(ToolSpec(name="f", parameters="1" * 200_000),)),
        ChatMessage("user", "Hi", tools=(ToolSpec(name="f", description="1" * 200_000),)),
        ChatMessage(
            "assistant", "", tool_calls=(ToolCall(call_id="c", name="f", arguments="1" * 200_000),)
        ),
    ],
)
def test_tools_and_calls_are_part_of_the_prompt(message: ChatMessage, overflow: Any) -> None:
    counting = Counting(1)
    with pytest.raises(PromptTooLongError, match="200.* bytes; that cannot fit"):
        builder(counting).build([message], reply_len=10, overflow=overflow)
    assert counting.num_chars == 0


def long_conversation(num_turns: int, num_chars: int) -> list[ChatMessage]:
    turns = [
        ChatMessage(role, f"{number:04} {role[0]}".ljust(num_chars, "."))
        for number in range(num_turns)
        for role in ("user", "assistant")
    ]
    return [ChatMessage("system", "Be kind."), *turns, ChatMessage("user", "And now?")]


@pytest.mark.parametrize(("num_turns", "num_chars"), [(100, 100), (1000, 300), (1000, 100)])
def test_the_oldest_turns_of_a_conversation_that_is_far_too_long_are_left_out(
    num_turns: int, num_chars: int
) -> None:
    counting = Counting(1)
    messages = long_conversation(num_turns, num_chars)
    prompt = builder(counting).build(messages, reply_len=10, overflow="drop_oldest")
    assert 1000 < len(prompt.token_ids) <= MAX_CONTEXT - 10
    assert messages[1 + prompt.num_dropped].role == "user"
    # What cannot fit is not encoded: all streams wait meanwhile.
    assert counting.num_chars < 6 * MAX_CONTEXT


def test_a_growing_conversation_that_is_far_too_long_keeps_its_beginning() -> None:
    build = builder(Counting(2)).build
    cuts = [
        build(long_conversation(num_turns, 60), reply_len=10, overflow="drop_oldest").num_dropped
        for num_turns in range(400, 440)
    ]
    assert cuts == sorted(cuts)
    assert len(set(cuts)) <= 12


def test_turns_that_are_too_long_with_the_last_one_alone_are_refused() -> None:
    messages = [*long_conversation(10, 100), ChatMessage("user", "1" * 100_000)]
    with pytest.raises(PromptTooLongError, match="more than 2500 tokens"):
        builder(Counting(1)).build(messages, reply_len=10, overflow="drop_oldest")


@pytest.mark.parametrize("where", ["tools", "calls"])
def test_what_is_left_out_is_not_found_by_encoding_turn_after_turn(where: str) -> None:
    """Short turns behind long declarations of tools, or before turns with long calls."""
    counting = Counting(1)
    tools: tuple[ToolSpec, ...] = ()
    calls: list[ChatMessage] = []
    if where == "tools":
        tools = (ToolSpec(name="f", description="d" * 1200),)
    else:
        call = ToolCall(call_id="c", name="f", arguments="1" * 400)
        calls = [
            ChatMessage("assistant", "", tool_calls=(call,)),
            ChatMessage("tool", "Done.", call_id="c"),
        ]
    turns = [ChatMessage(role, "ok") for _ in range(400) for role in ("user", "assistant")]
    end = [ChatMessage("user", "Please."), *calls * 3, ChatMessage("user", "And now?")]
    prompt = builder(counting).build(
        [ChatMessage("system", "Be kind.", tools=tools), *turns, *end],
        reply_len=10,
        overflow="drop_oldest",
    )
    assert prompt.num_dropped and len(prompt.token_ids) > MAX_CONTEXT / 2
    assert counting.num_chars < 6 * MAX_CONTEXT
