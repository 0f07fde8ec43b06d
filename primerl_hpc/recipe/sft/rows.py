"""One row of supervised data, and the conversation, tools and template settings that it holds.

The trainer reads rows during training, and `resolve` checks the first ones before a run starts. Every error names file,
row and column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.safety.decoding import parse_json

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that a message may have."""


@dataclass(frozen=True)
class Row:
    """A row of a file or dataset."""

    location: str
    """``file:row``, counted from 1, for error messages."""
    values: dict[str, Any]
    """Column → value."""


def row_messages(row: Row) -> list[dict[str, Any]]:
    """Return the conversation of a row: ``messages``, else ``prompt`` + ``completion`` (each text or messages).

    Raises DataError with file, row and the missing column, or the message whose role is not one of `ROLES`.
    """
    if row.values.get("messages"):
        return _as_messages(row, "messages", role="")
    for column in ("prompt", "completion"):
        if row.values.get(column) is None:
            raise DataError(
                f"column '{column}' is missing, and so is 'messages'",
                location=row.location,
                hint="a row needs messages, or prompt and completion",
            )
    return _as_messages(row, "prompt", role="user") + _as_messages(row, "completion", role="assistant")


def _as_messages(row: Row, column: str, *, role: str) -> list[dict[str, Any]]:
    value = row.values[column]
    if isinstance(value, str) and role:
        return [{"role": role, "content": value}]
    if not _is_list_of_messages(value):
        raise DataError(
            f"column '{column}' must hold {'text or ' if role else ''}a list of messages with a role",
            location=row.location,
        )
    for number, message in enumerate(value, start=1):
        if message["role"] not in ROLES:
            raise DataError(
                f"column '{column}': message {number} has the unknown role {message['role']!r:.40}",
                location=row.location,
                hint=f"the roles are {', '.join(ROLES)}",
            )
    return [{key: item for key, item in message.items() if item is not None} for message in value]


def _is_list_of_messages(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and all(
        isinstance(message, dict) and "role" in message for message in value
    )


def parts_for_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    """Describe the parts of a conversation that only a renderer with tools can render; empty if there are none."""
    calls = [str(number) for number, message in enumerate(messages, start=1) if message.get("tool_calls")]
    parts = ["tools"] if tools else []
    if calls:
        parts.append(f"tool calls in message{'s' if len(calls) > 1 else ''} {', '.join(calls)}")
    return " and ".join(parts)


def tools_refused(row: Row, parts: str, renderer: str) -> DataError:
    """Return the error for a row with ``parts`` (see `parts_for_tools`) that ``renderer`` does not render."""
    return DataError(
        f"the row has {parts}, which {renderer} does not render",
        location=row.location,
        hint="set model.renderer.name to the model's family, or remove tools and tool calls from the rows",
    )


def row_tools(row: Row) -> list[dict[str, Any]] | None:
    """Return the tools of a row (``tools`` or ``tool_defs``: a list, or its JSON text), or None.

    Each tool has the form ``{"type": "function", "function": {…}}``, as the tools of environments do. Raises DataError.
    """
    column = next((name for name in ("tools", "tool_defs") if row.values.get(name)), None)
    if column is None:
        return None
    tools = _parsed(row, column)
    if not isinstance(tools, list):
        raise DataError(f"column '{column}' must hold a list of tools", location=row.location)
    return [_as_tool(row, column, tool) for tool in tools]


def _as_tool(row: Row, column: str, tool: Any) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(
            f"column '{column}': a tool must be a mapping with name, description and parameters, not {tool!r:.80}",
            location=row.location,
        )
    parameters = function.get("parameters")
    if isinstance(parameters, str):
        parameters = _parsed_text(row, column, parameters)
    kept = {key: value for key, value in function.items() if value is not None and key != "type"}
    return {"type": "function", "function": kept | ({} if parameters is None else {"parameters": parameters})}


def row_template_kwargs(row: Row) -> dict[str, Any]:
    """Return ``chat_template_kwargs`` (a mapping, or its JSON text) without settings that are null.

    Raises DataError.
    """
    if not row.values.get("chat_template_kwargs"):
        return {}
    kwargs = _parsed(row, "chat_template_kwargs")
    if not isinstance(kwargs, dict):
        raise DataError("column 'chat_template_kwargs' must hold a mapping", location=row.location)
    return {key: value for key, value in kwargs.items() if value is not None}


def check_row(row: Row, without_tools: str | None = None) -> None:
    """Raise DataError for the first column that the trainer could not use.

    ``without_tools``: description of the renderer if it is known not to render tools.
    """
    messages, tools = row_messages(row), row_tools(row)
    row_template_kwargs(row)
    if without_tools is not None and (parts := parts_for_tools(messages, tools)):
        raise tools_refused(row, parts, without_tools)


def _parsed(row: Row, column: str) -> Any:
    value = row.values[column]
    return _parsed_text(row, column, value) if isinstance(value, str) else value


def _parsed_text(row: Row, column: str, text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(
            f"column '{column}' holds text that is not valid JSON ({error})", location=row.location
        ) from error
