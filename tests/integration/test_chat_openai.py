"""The stock `openai` package against a real server: only the base URL is ours."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel

pytestmark = pytest.mark.integration

ASK: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You are a helpful assistant. Answer in one short sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The current weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def client(server_url: str) -> Any:
    with OpenAI(base_url=f"{server_url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_a_conversation(client: OpenAI) -> None:
    first = client.chat.completions.create(
        model="parley", messages=ASK, temperature=0, max_completion_tokens=32
    )
    assert "Paris" in (first.choices[0].message.content or "")
    assert first.choices[0].finish_reason in ("stop", "length")
    assert first.usage is not None and first.usage.prompt_tokens > 20
    messages = [
        *ASK,
        first.choices[0].message,
        {"role": "user", "content": [{"type": "text", "text": "And of Italy?"}]},
    ]
    second = client.chat.completions.create(
        model="gpt-4o-mini",
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=16,
    )
    assert second.choices[0].message.content
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None and cached >= first.usage.prompt_tokens - 16
    assert [model.id for model in client.models.list()][1] == "parley"
    assert client.models.retrieve("parley").object == "model"


async def test_streams_say_what_whole_answers_say(server_url: str) -> None:
    params: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 11, "top_p": 0.9},
        {"temperature": 1.1, "seed": 12, "presence_penalty": 0.5, "stop": ["the"]},
        {"temperature": 0.7, "seed": 13, "logit_bias": {"7042": -100}},
    ]

    async with AsyncOpenAI(base_url=f"{server_url}/v1", api_key="any") as client:

        async def whole(fields: dict[str, Any]) -> tuple[str, str, int]:
            answer = await client.chat.completions.create(
                model="parley", messages=ASK, max_tokens=24, **fields
            )
            assert answer.usage is not None
            choice = answer.choices[0]
            return choice.message.content or "", choice.finish_reason, answer.usage.total_tokens

        async def streamed(fields: dict[str, Any]) -> tuple[str, str, int]:
            text, reason, total = "", "", 0
            stream = await client.chat.completions.create(
                model="parley",
                messages=ASK,
                max_tokens=24,
                stream=True,
                stream_options={"include_usage": True},
                **fields,
            )
            async for chunk in stream:
                if chunk.usage is not None:
                    total = chunk.usage.total_tokens
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    reason = choice.finish_reason or reason
            return text, reason, total

        alone = [await whole(fields) for fields in params]
        together = await asyncio.gather(*(streamed(fields) for fields in params))
        assert list(together) == alone
        assert all(text for text, _, _ in alone)


def test_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="parley", messages=ASK, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    for entry in choice.logprobs.content:
        assert entry.logprob <= 0
        values = [other.logprob for other in entry.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert entry.logprob == values[0], "greedy takes the likeliest"


def test_a_call_is_made_answered_and_told(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris in celsius?"}]
    answer = client.chat.completions.create(
        model="parley",
        messages=messages,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit"}
    assert arguments["unit"] in ("celsius", "fahrenheit")
    messages += [
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": "18 degrees and sunny"},
    ]
    told = client.chat.completions.create(
        model="parley", messages=messages, tools=[WEATHER], temperature=0, max_tokens=40
    )
    assert told.choices[0].message.content or told.choices[0].message.tool_calls


def test_a_named_call_streams(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="parley",
        messages=[{"role": "user", "content": "Weather in Rome?"}],
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        temperature=0,
        max_tokens=80,
    ) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion()
    assert len(deltas) > 3
    assert final.choices[0].message.tool_calls is not None
    (call,) = final.choices[0].message.tool_calls
    assert "".join(delta.arguments_delta for delta in deltas) == call.function.arguments
    assert isinstance(json.loads(call.function.arguments), dict)


class Review(BaseModel):
    """What a review says."""

    sentiment: Literal["good", "bad"]
    stars: int
    is_long: bool


def test_structured_outputs(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="parley",
        messages=[{"role": "user", "content": "Review: I love this phone! Rate it."}],
        response_format=Review,
        temperature=0,
        max_tokens=60,
    )
    assert isinstance(answer.choices[0].message.parsed, Review)


def test_tools_from_models(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="parley",
        messages=[{"role": "user", "content": "Store my review: bad phone, one star."}],
        tools=[openai.pydantic_function_tool(Review)],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=90,
    )
    assert answer.choices[0].message.tool_calls is not None
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Review)


def test_json_choice_and_pattern(client: OpenAI) -> None:
    def ask(question: str, **fields: Any) -> str:
        answer = client.chat.completions.create(
            model="parley",
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=60,
            **fields,
        )
        return answer.choices[0].message.content or ""

    choice = {"structured_outputs": {"choice": ["yes", "no"]}}
    assert ask("Is fire hot?", extra_body=choice) in ("yes", "no")
    pattern = {"structured_outputs": {"regex": r"[0-9]{3}-[0-9]{4}"}}
    assert len(ask("A phone number?", extra_body=pattern)) == 8
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}}
    wanted = {
        "type": "json_schema",
        "json_schema": {
            "name": "n",
            "schema": {**schema, "required": ["n"], "additionalProperties": False},
        },
    }
    assert json.loads(ask("A number as JSON.", response_format=wanted))["n"] <= 9


def test_errors_have_the_classes_that_clients_catch(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="llama-99", messages=ASK)
    with pytest.raises(openai.BadRequestError, match="context") as too_long:
        client.chat.completions.create(
            model="parley", messages=[{"role": "user", "content": "word " * 5000}]
        )
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="top_p") as refused:
        client.chat.completions.create(model="parley", messages=ASK, top_p=0)
    assert refused.value.param == "top_p"
    with pytest.raises(openai.BadRequestError, match="at least 1 item"):
        client.chat.completions.create(model="parley", messages=[])


def test_breaking_off_a_stream_does_no_harm(client: OpenAI) -> None:
    for _ in range(12):  # more than there are places to run
        stream = client.chat.completions.create(
            model="parley",
            messages=[{"role": "user", "content": "Tell me a long story."}],
            stream=True,
        )
        next(iter(stream))
        stream.close()
    assert client.chat.completions.create(model="parley", messages=ASK, max_tokens=1).choices
