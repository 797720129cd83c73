"""Tools as clients declare them, for a session or for one response."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, StringConstraints

from app.api.validation import AtMost, WireModel, invalid, unsupported
from app.conversation import Tool, ToolChoice
from app.errors import ClientError

MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 64 * 1024

ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Schema = Annotated[dict[str, Any], AtMost(1024)]


def _tool_type(value: Any) -> Any:
    if value == "mcp":
        raise unsupported(
            "This server does not speak to MCP servers: declare functions, or let its operator "
            "register Python functions (PARLEY_TOOLS)."
        )
    return value


def _schema(value: Any) -> Any:
    """An object schema of bounded size; what the schema says is for the model to follow."""
    if not isinstance(value, dict):
        return value
    if value and value.get("type", "object") != "object":
        raise invalid("expected a JSON schema of type 'object'")
    if len(msgspec.json.encode(value)) > MAX_SCHEMA_BYTES:
        raise invalid(f"expected a JSON schema of at most {MAX_SCHEMA_BYTES} bytes")
    return value


class FunctionTool(WireModel):
    """``{"type": "function", "name", "description", "parameters"}``."""

    type: Annotated[Literal["function"], BeforeValidator(_tool_type)]
    name: ToolName
    description: Annotated[str, StringConstraints(max_length=8192)] = ""
    parameters: Annotated[Schema | None, BeforeValidator(_schema)] = None

    def to_wire(self) -> dict[str, Any]:
        """As the session object shows it."""
        shown = {"type": self.type, "name": self.name, "description": self.description}
        return shown if self.parameters is None else {**shown, "parameters": self.parameters}

    def to_domain(self) -> Tool:
        """In the conversation's terms; without parameters it takes none."""
        return Tool(
            self.name, self.description, self.parameters or {"type": "object", "properties": {}}
        )


def _choice(value: Any) -> Any:
    if value is None or isinstance(value, ToolChoice):
        return value
    if value in ("auto", "none", "required"):
        return ToolChoice(value)
    if isinstance(value, dict) and value.get("type") == "mcp":
        raise unsupported("This server does not speak to MCP servers.")
    if (
        isinstance(value, dict)
        and value.keys() == {"type", "name"}
        and value["type"] == "function"
        and isinstance(value["name"], str)
    ):
        return ToolChoice("function", value["name"])
    raise invalid('expected "auto", "none", "required", or {"type": "function", "name": "..."}')


Tools = Annotated[list[FunctionTool], AtMost(MAX_TOOLS)] | None
Choice = Annotated[ToolChoice | None, BeforeValidator(_choice)]


def tools_of(tools: list[FunctionTool] | None) -> tuple[Tool, ...]:
    """The tools in the conversation's terms."""
    return tuple(tool.to_domain() for tool in tools or ())


def choice_to_wire(choice: ToolChoice | None) -> str | dict[str, str]:
    """As the session object shows it."""
    if choice is None:
        return "auto"
    if choice.kind == "function":
        return {"type": "function", "name": choice.name or ""}
    return choice.kind


def check_tools(
    tools: tuple[Tool, ...], choice: ToolChoice | None, server_tools: tuple[str, ...], prefix: str
) -> None:
    """Raise ClientError for two tools of one name, and for a choice that cannot be followed."""
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ClientError(
                f"Invalid value for '{prefix}.tools[{index}].name': {name!r} is there twice.",
                code="invalid_value",
                param=f"{prefix}.tools[{index}].name",
            )
    if choice is None:
        return
    known = {*names, *server_tools}
    if choice.kind == "function" and choice.name not in known:
        problem = f"there is no tool named {choice.name!r}"
    elif choice.kind == "required" and not known:
        problem = "'required' needs at least one tool"
    else:
        return
    raise ClientError(
        f"Invalid value for '{prefix}.tool_choice': {problem}.",
        code="invalid_value",
        param=f"{prefix}.tool_choice",
    )
