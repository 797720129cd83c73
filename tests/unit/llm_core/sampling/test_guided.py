"""Guides: what may be said, what may not, and what cannot be a guide."""

from __future__ import annotations

import contextlib
import json
import re
import time
from typing import Any

import numpy as np
import pytest

from llm_core.errors import InvalidRequestError
from llm_core.messages import (
    ChoiceGuide,
    Guide,
    JsonGuide,
    RegexGuide,
    ToolFormat,
    ToolGuide,
    ToolSpec,
)
from llm_core.structured.constraint import GuideCompiler, GuideState
from llm_core.structured.grammar import MAX_GUIDE_CHARS, grammar_of, guide_key
from tests.support.tiny_model import tiny_tokenizer

EOS = 2
TOKENIZER = tiny_tokenizer()


def start(guide: Guide, tool_format: ToolFormat = "hermes") -> GuideState:
    return GuideCompiler(TOKENIZER, tool_format).start(guide)


def fits(guide: Guide, text: str, tool_format: ToolFormat = "hermes") -> bool:
    """Whether ``text`` may be said as a whole reply."""
    state = start(guide, tool_format)
    for token_id in TOKENIZER.encode(text):
        if state.is_complete or not state.allowed()[token_id]:
            return False
        state.accept(token_id)
    return state.is_complete or bool(state.allowed()[EOS])


def schema(**value: Any) -> JsonGuide:
    return JsonGuide(schema=json.dumps(value))


def test_a_schema() -> None:
    guide = schema(
        type="object",
        properties={"city": {"type": "string"}, "n": {"type": "integer", "minimum": 0}},
        required=["city"],
        additionalProperties=False,
    )
    assert fits(guide, '{"city": "the café", "n": 12}')
    assert fits(guide, '{"city": ""}')
    for wrong in ('{"n": 1}', '{"city": 5}', '{"city": "x", "n": -1}', '{"city": "x"', "hello", ""):
        assert not fits(guide, wrong), wrong
    assert not fits(guide, '{\n\n\n"city": "x"}'), "models get lost in free whitespace"


def test_any_object() -> None:
    assert fits(JsonGuide(), '{"a": [1, null, {"b": true}]}')
    assert not fits(JsonGuide(), "[1]")
    assert not fits(JsonGuide(), '"text"')


def test_a_pattern() -> None:
    guide = RegexGuide(pattern=r"\+?[0-9]{2}-[a-z/]+")
    assert fits(guide, "+12-a/b") and fits(guide, "12-a")
    assert not fits(guide, "1-a") and not fits(guide, "12-") and not fits(guide, " 12-a")


def test_choices_are_taken_literally() -> None:
    options = ("yes", "yes sir", 'say "no"\n', "a|b", "\\d", "été")
    guide = ChoiceGuide(options=options)
    assert all(fits(guide, option) for option in options)
    assert not any(fits(guide, text) for text in ("ye", "a", "b", "5", "yes ", "no"))


TOOLS = (
    ToolSpec(
        name="get_weather",
        parameters=json.dumps(
            {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
        ),
    ),
    ToolSpec(name="stop"),
)
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
STOP = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'


def test_required_calls() -> None:
    one = ToolGuide(tools=TOOLS, required=True, parallel=False)
    assert fits(one, PARIS) and fits(one, STOP)
    assert not fits(one, f"{PARIS}\n{STOP}")
    assert not fits(one, f"Sure. {PARIS}") and not fits(one, "Sure.")
    assert fits(ToolGuide(tools=TOOLS, required=True), f"{PARIS}\n{STOP}")
    only = ToolGuide(tools=TOOLS[1:], required=True)
    assert fits(only, STOP) and not fits(only, PARIS)


def call_of(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


def takes(parameters: dict[str, Any], arguments: str) -> bool:
    tool = ToolSpec(name="f", parameters=json.dumps(parameters))
    return fits(ToolGuide(tools=(tool,), required=True), call_of(arguments))


def test_arguments_are_those_that_are_declared() -> None:
    pizza = {"type": "object", "properties": {"kind": {"type": "string"}}}
    assert takes(pizza, '{"kind": "x"}') and takes(pizza, "{}")
    assert not takes(pizza, '{"kind": "x", "size": 1}')
    nothing: dict[str, Any] = {"type": "object", "properties": {}}
    assert takes(nothing, "{}") and not takes(nothing, '{"value": 1}')
    for said in ({}, {"type": "object"}, {"type": "object", "description": "none"}):
        assert takes(said, "{}") and not takes(said, '{"value": 1}')
    free = {"type": "object", "properties": {"a": {"type": "object"}}}
    assert takes(free, '{"a": {"b": 1}}') and not takes(free, '{"b": 1}')
    nested = {"type": "object", "properties": {"a": {"type": "array", "items": pizza}}}
    assert takes(nested, '{"a": [{"kind": "x"}]}') and not takes(nested, '{"a": [{"b": 1}]}')


def test_references_inside_the_parameters_of_a_tool() -> None:
    """As pydantic writes models of models; each tool has its own definitions."""

    def order(kind: str) -> str:
        pizza = {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}
        ref = {"$ref": "#/$defs/Pizza"}
        properties = {"first": ref, "rest": {"type": "array", "items": {"anyOf": [ref]}}}
        return json.dumps({"type": "object", "properties": properties, "$defs": {"Pizza": pizza}})

    tools = (ToolSpec(name="g", parameters=order("a")), ToolSpec(name="f", parameters=order("b")))
    guide = ToolGuide(tools=tools, required=True)
    assert fits(guide, call_of('{"first": {"kind": "b"}, "rest": [{"kind": "b"}]}'))
    assert not fits(guide, call_of('{"first": {"kind": "a"}}'))
    assert not fits(guide, call_of('{"first": {"kind": "b", "size": 1}}'))
    tree = {"type": "object", "properties": {"child": {"$ref": "#"}}}
    assert takes(tree, '{"child": {"child": {}}}') and not takes(tree, '{"child": {"x": 1}}')


@pytest.mark.parametrize("name", ["Größe", "a b", "List<str>", "100%25", "a~1b"])
def test_references_to_names_of_any_letters(name: str) -> None:
    key = name.replace("%25", "%").replace("~1", "/")
    size = {"$defs": {key: {"type": "integer"}}}
    parameters = {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{name}"}}, **size}
    assert takes(parameters, '{"a": 1}') and not takes(parameters, '{"a": "x"}')
    assert fits(schema(**parameters), '{"a": 1}')


def test_references_in_a_schema_with_a_name_of_its_own() -> None:
    for own_id in ("https://example.com/order", "/order", "order#"):
        for ref in ("#/$defs/A", f"{own_id.removesuffix('#')}#/$defs/A"):
            parameters = {"$id": own_id, "properties": {"a": {"$ref": ref}}}
            assert takes({**parameters, "$defs": {"A": {"type": "integer"}}}, '{"a": 1}'), ref


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "additionalProperties": True},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True},
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "additionalProperties": {"type": "integer"},
        },
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}},
                {"type": "object", "properties": {"b": {"type": "integer"}}},
            ]
        },
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "anyOf": [{"properties": {"b": {"type": "integer"}}, "required": ["b"]}],
        },
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]},
        {"type": "object", "properties": {}, "minProperties": 1},
        {"type": "object", "properties": {}, "propertyNames": {"pattern": "^[ab]$"}},
        {"properties": {"a": {"type": "integer"}}, "dependentRequired": {"a": ["b"]}},
    ],
)
def test_objects_that_may_have_more_still_do(parameters: dict[str, Any]) -> None:
    assert takes(parameters, '{"a": 1, "b": 2}')


def test_a_schema_nested_without_end_is_refused_or_taken() -> None:
    deep = '{"type": "object", "properties": {"a": '
    for depth in (100, 400, 700):
        parameters = deep * depth + "{}" + "}}" * depth
        with contextlib.suppress(InvalidRequestError):
            start(ToolGuide(tools=(ToolSpec(name="f", parameters=parameters),)))


def test_free_calls_are_well_formed_and_text_is_free() -> None:
    guide = ToolGuide(tools=TOOLS)
    for text in ("Hello, 5 < 6 <tool>.", "", PARIS, f"Sure. {PARIS}\n{STOP}\nDone."):
        assert fits(guide, text), text
    for wrong in (
        PARIS.replace("get_weather", "rm"),
        PARIS.replace('"city"', '"town"').replace("Paris", "x"),
        PARIS.removesuffix("}\n</tool_call>"),
        "<tool_call> go",
    ):
        assert not fits(guide, wrong), wrong
    once = ToolGuide(tools=TOOLS, parallel=False)
    assert fits(once, PARIS) and fits(once, f"Sure. {PARIS}") and fits(once, "no call")
    for more in (STOP, "<tool_call>\n{", "<tool_call> go"):
        assert not fits(once, f"{PARIS}\n{more}"), more
        assert not fits(once, f"{PARIS}{more}"), more


def test_calls_or_json() -> None:
    text = JsonGuide(schema='{"type": "integer"}')
    for tool_format, call in (("hermes", STOP), ("llama3", '{"name": "stop", "parameters": {}}')):
        guide = ToolGuide(tools=TOOLS, text=text)
        assert fits(guide, "12", tool_format) and fits(guide, call, tool_format)
        assert not fits(guide, "hello", tool_format)


def test_remarks_may_be_long() -> None:
    assert fits(schema(type="integer", description="x" * 5000, title="y" * 2000), "5")


def test_keywords_that_cannot_be_enforced() -> None:
    value = json.dumps({"type": "integer", "not": {"const": 3}})
    assert fits(JsonGuide(schema=value, strict=False), "3")
    with pytest.raises(InvalidRequestError, match="not"):
        start(JsonGuide(schema=value))
    parameters = json.dumps({"type": "object", "not": {}})
    start(ToolGuide(tools=(ToolSpec(name="f", parameters=parameters),)))
    with pytest.raises(InvalidRequestError, match="not"):
        start(ToolGuide(tools=(ToolSpec(name="f", parameters=parameters, strict=True),)))


def test_calls_of_llama() -> None:
    call = '{"name": "stop", "parameters": {}}'
    assert fits(ToolGuide(tools=TOOLS, required=True), call, "llama3")
    assert not fits(ToolGuide(tools=TOOLS, required=True), "Hello", "llama3")
    free = ToolGuide(tools=TOOLS)
    assert fits(free, call, "llama3") and fits(free, "Hello {you}", "llama3")
    assert not fits(free, '{"name": "rm", "parameters": {}}', "llama3")


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (JsonGuide(schema="{"), "schema: not JSON"),
        (JsonGuide(schema="[" * 20_000), "schema: not JSON"),
        (JsonGuide(schema="[]"), "schema: must be a JSON object"),
        (schema(type="foo"), "schema: .*foo"),
        (schema(type="string", pattern="(?=a)b"), "schema: .*regex"),
        (schema(**{"$ref": "http://example.com/x"}), "schema: .*example.com"),
        (schema(type="object", properties={"a": {"not": {}}}), "schema: .*not"),
        (schema(allOf=[{"type": "string"}, {"type": "number"}]), "schema: .*nsatisfiable"),
        (schema(**{"$ref": "#"}), "schema: "),
        (schema(enum=["x" * MAX_GUIDE_CHARS]), f"schema: .*{MAX_GUIDE_CHARS}"),
        (RegexGuide(pattern="("), "regex: "),
        (RegexGuide(pattern=""), "regex: "),
        (RegexGuide(pattern="a" * 1001), "regex: .*1000 characters, got 1001"),
        (schema(type="string", pattern="a" * 1001), "schema: .*1000 characters, got 1001"),
        (schema(properties={"a" * 1001: {}}), "schema: .*1000 characters, got 1001"),
        (ChoiceGuide(options=("a", "b" * 1001)), "choice: .*1000"),
        (ChoiceGuide(options=()), "choice: "),
        (ChoiceGuide(options=("a", "")), "choice: "),
        (ChoiceGuide(options=("a",) * 1001), "choice: "),
        (ToolGuide(tools=(), required=True), "tools: "),
        (ToolGuide(tools=(ToolSpec(name="f", parameters="{"),)), "tools: f: parameters"),
        (ToolGuide(tools=(ToolSpec(name="f", parameters='{"type": "x"}'),)), "tools: "),
        (ToolGuide(tools=(ToolSpec(name="f", parameters="5"),)), "tools: "),
    ],
)
def test_what_cannot_be_a_guide_is_refused_with_a_reason(guide: Guide, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refused:
        start(guide)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "guide",
    [
        schema(type="object", properties={f"key{i}": {"type": "string"} for i in range(900)}),
        schema(enum=[f"value {i}" for i in range(2000)]),
        schema(type="string", pattern="([a-z]{1,500}){1,500}"),
        RegexGuide(pattern="(a|b)*a(a|b){200}"),
        RegexGuide(pattern="a?" * 333 + "a" * 333),
        schema(type="array", items={"const": "a" * 1000}),
        schema(type="array", items={"type": "integer"}, minItems=1_000_000),
    ],
)
def test_a_hostile_guide_costs_little_or_is_refused(guide: Guide) -> None:
    started_s = time.process_time()
    try:
        state = start(guide)
        for _ in range(20):
            (token_ids,) = np.nonzero(state.allowed())
            if state.is_complete or not len(token_ids):
                break
            state.accept(int(token_ids[-1]))
    except InvalidRequestError as error:
        assert re.match(r"(regex|schema): ", str(error))
    assert time.process_time() - started_s < 2.0


def test_a_guide_that_grows_beyond_its_limits_is_the_requests_fault() -> None:
    state = start(RegexGuide(pattern="((a{1,1000}){1,1000}){1,1000}"))
    (token_ids,) = np.nonzero(state.allowed())
    with pytest.raises(InvalidRequestError, match=r"^regex: it is too complex to follow: "):
        for _ in range(1000):
            state.accept(int(token_ids[-1]))
            state.allowed()


def test_replies_with_one_guide_do_not_share_their_place() -> None:
    compiler = GuideCompiler(TOKENIZER, "hermes")
    guide = ChoiceGuide(options=("ab", "cd"))
    first, second = compiler.start(guide), compiler.start(guide)
    a, c = TOKENIZER.encode("a")[0], TOKENIZER.encode("c")[0]
    first.accept(a)
    assert second.allowed()[c] and not first.allowed()[c]


def test_many_guides_are_not_all_kept() -> None:
    compiler = GuideCompiler(TOKENIZER, "hermes")
    guides = [ChoiceGuide(options=(f"option {number}",)) for number in range(140)]
    for guide in guides:
        compiler.start(guide)
        assert compiler.find(guide_key(guides[0])), "used again and again"
    kept = [guide for guide in guides if compiler.find(guide_key(guide))]
    assert kept == [guides[0], *guides[-127:]]


def test_large_guides_are_kept_in_smaller_numbers() -> None:
    compiler = GuideCompiler(TOKENIZER, "hermes")
    compiled = compiler.compile(grammar_of(ChoiceGuide(options=("a",)), "hermes"), 100 << 20)
    for key in (b"a", b"b", b"b", b"c"):
        compiler.keep(key, compiled)
    assert [key for key in (b"a", b"b", b"c") if compiler.find(key)] == [b"b", b"c"]


def test_an_error_is_kept_like_a_guide() -> None:
    compiler = GuideCompiler(TOKENIZER, "hermes")
    guide = ChoiceGuide(options=("a",))
    compiler.keep(guide_key(guide), InvalidRequestError("choice: too hard"))
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="too hard"):
            compiler.start(guide)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"multipleOf": 2**31}, "multipleOf"),
        (
            {"type": "object", "properties": {"n": {"multipleOf": 10_001}}},
            "properties.n.multipleOf",
        ),
        ({"anyOf": [{"type": "null"}, {"multipleOf": -1e9}]}, "anyOf[1].multipleOf"),
        ({"$defs": {"a": {"items": {"multipleOf": 10**400}}}}, "$defs.a.items.multipleOf"),
    ],
)
def test_a_step_that_is_too_large_is_refused_by_its_place(value: Any, place: str) -> None:
    text = json.dumps(value)
    for guide in (
        JsonGuide(schema=text),
        JsonGuide(schema=text, strict=False),
        ToolGuide(tools=(ToolSpec(name="f", parameters=text),)),
        ToolGuide(tools=TOOLS, text=JsonGuide(schema=text)),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            grammar_of(guide, "hermes")
        assert f"{place}: must be at most 10000, got " in str(refused.value)


def test_a_step_of_any_other_size_is_followed() -> None:
    assert fits(schema(type="integer", multipleOf=10_000), "20000")
    assert not fits(schema(type="integer", multipleOf=10_000), "20001")
    assert fits(schema(type="number", multipleOf=0.01), "1.25")
    assert fits(schema(type="object", properties={"multipleOf": {"type": "integer"}}), "{}")


def test_tools_have_a_limit_together() -> None:
    tools = tuple(
        ToolSpec(name=f"f{n}", parameters=json.dumps({"title": "x" * 30_000})) for n in range(9)
    )
    with pytest.raises(InvalidRequestError, match=r"^tools: .*262144 characters in all, got 27"):
        grammar_of(ToolGuide(tools=tools), "hermes")


class Hours:
    """CPU time, of which each operation takes as much as is said."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.each_ms = 0.0

    def __call__(self) -> int:
        self.now_ns += int(self.each_ms * 1_000_000)
        return self.now_ns


def timed_state(guide: Guide) -> tuple[GuideState, Hours]:
    compiler, clock = GuideCompiler(TOKENIZER, "hermes"), Hours()
    compiled = compiler.compile(grammar_of(guide, "hermes"))
    return GuideState(compiled, TOKENIZER.vocab_size, clock=clock), clock


def speak(state: GuideState, num_tokens: int) -> None:
    """Says the letter a."""
    (letter,) = TOKENIZER.encode("a")
    for _ in range(num_tokens):
        state.allowed()
        state.forced()
        state.num_allowed([letter])
        state.accept(letter)


def test_one_operation_that_is_long_ends_the_reply() -> None:
    state, clock = timed_state(RegexGuide(pattern="[a-z]*"))
    speak(state, 10)
    clock.each_ms = 21.0
    with pytest.raises(InvalidRequestError, match="^regex: it takes too much time to follow"):
        state.allowed()


def test_operations_that_are_long_on_average_end_the_reply() -> None:
    state, clock = timed_state(RegexGuide(pattern="[a-z]*"))
    clock.each_ms = 0.5  # four of them a token
    speak(state, 500)
    clock.each_ms = 3.0
    with pytest.raises(InvalidRequestError, match="too much time"):
        speak(state, 20)
