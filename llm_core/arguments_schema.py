"""The schema of a tool's arguments as the model is held to it.

JSON Schema lets an object have further properties unless it says no, which hardly any declaration
of a function does. A small model that may invent arguments does so in every call, and a function
without parameters never gets the empty object that it takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# These bring properties from elsewhere: somewhere in the schema; beside `properties`.
_COMBINES = frozenset(("allOf", "not", "if", "dependentSchemas", "$dynamicRef"))
_BRINGS = frozenset(("anyOf", "oneOf", "$ref"))
_SAYS_ITSELF = frozenset(("additionalProperties", "patternProperties", "unevaluatedProperties"))
_SAYS_NOTHING = frozenset(("type", "title", "description", "$schema", "strict"))
# Keywords that hold schemas by names; alone or in lists.
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_OTHERS = (
    *("items", "prefixItems", "contains", "additionalProperties", "unevaluatedProperties"),
    *("propertyNames", "anyOf", "oneOf", "allOf", "not", "if", "then", "else"),
)


def close_objects(schema: Any) -> None:
    """Changes ``schema`` (parsed JSON): objects that name their properties have no others.

    An object that names none, and one that says itself what else it may have, stays as it is; but
    the whole, the arguments, has none where nothing is said of them. A schema in which some object
    takes properties from elsewhere, too, stays as it is: what is shut out in one place could be
    asked for in the other.
    """
    says_nothing = isinstance(schema, dict) and schema.keys() <= _SAYS_NOTHING
    if says_nothing and schema.setdefault("type", "object") == "object":
        schema["additionalProperties"] = False
    found = list(_schemas(schema))
    if any(_COMBINES & one.keys() for one in found):
        return
    if any("properties" in one and _BRINGS & one.keys() for one in found):
        return
    for one in found:
        if isinstance(one.get("properties"), dict) and not _SAYS_ITSELF & one.keys():
            one["additionalProperties"] = False


def move_references(schema: Any, pointer: str) -> None:
    """Changes ``schema``: its references into itself (``#/$defs/x``) still find what they mean when
    it stands at ``pointer`` of another schema."""
    for one in _schemas(schema):
        target = one.get("$ref")
        if isinstance(target, str) and (target == "#" or target.startswith("#/")):
            one["$ref"] = f"#{pointer}{target[1:]}"


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """``schema`` and those inside it; without recursion, for they may be nested as deep as people
    like."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        if not isinstance(value, dict):
            continue
        yield value
        waiting += [value[key] for key in _OTHERS if key in value]
        for key in _NAMED:
            if isinstance(named := value.get(key), dict):
                waiting += named.values()
