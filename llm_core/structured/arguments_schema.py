"""The schema of a tool's arguments as the model is held to it.

JSON Schema lets an object have further properties unless it says no, which hardly any declaration
of a function does. A small model that may invent arguments does so in every call, and a function
without parameters never gets the empty object that it takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

# These bring properties from elsewhere: somewhere in the schema; beside `properties`.
_COMBINES = frozenset(
    ("allOf", "not", "if", "dependentSchemas", "dependentRequired", "dependencies", "$dynamicRef")
)
_BRINGS = frozenset(("anyOf", "oneOf", "$ref"))
_SAYS_ITSELF = frozenset(
    ("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties")
)
_SAYS_NOTHING = frozenset(("type", "title", "description", "$schema", "strict"))
# Stands for itself in a URI's fragment, or has been escaped already.
_OF_URIS = "/%~!$&'()*+,;=:@?"
# Keywords that hold schemas by names; alone or in lists.
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_OTHERS = (
    "items",
    "prefixItems",
    "contains",
    "additionalItems",
    "unevaluatedItems",
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "if",
    "then",
    "else",
)


def close_objects(schema: Any) -> None:
    """Changes ``schema`` (parsed JSON): objects that name their properties have no others.

    An object that names none, one that says itself what else it may have, and one that must have
    more than it names stay as they are; but the whole, the arguments, has none where nothing is
    said of them. A schema in which some object takes properties from elsewhere, too, stays as it
    is: what is shut out in one place could be asked for in the other.
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
        names = one.get("properties")
        if isinstance(names, dict) and not _SAYS_ITSELF & one.keys() and not _needs_more(one):
            one["additionalProperties"] = False


def _needs_more(schema: dict[str, Any]) -> bool:
    """No object of just the named properties would do."""
    names: dict[str, Any] = schema["properties"]
    required, least = schema.get("required"), schema.get("minProperties")
    is_unnamed = isinstance(required, list) and any(name not in list(names) for name in required)
    return is_unnamed or (isinstance(least, int | float) and least > len(names))


def move_references(schema: Any, pointer: str) -> None:
    """Changes ``schema``: its references into itself (``#/$defs/x``) still find what they mean when
    it stands at ``pointer`` of another schema. They are then URIs: ``#/$defs/a%20b``."""
    own_id = schema.pop("$id", None) if isinstance(schema, dict) else None
    for one in _schemas(schema):
        target = one.get("$ref")
        if not isinstance(target, str):
            continue
        if isinstance(own_id, str) and own_id:
            target = target.removeprefix(own_id.removesuffix("#")) or "#"
        if target == "#" or target.startswith("#/"):
            one["$ref"] = f"#{pointer}{quote(target[1:], safe=_OF_URIS)}"


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
