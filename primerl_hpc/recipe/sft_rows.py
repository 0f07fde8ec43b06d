"""One row of supervised data, and the conversation, tools and template settings it holds.

Read by the trainer, and by `resolve` before a run starts. Every error names file, row and column.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from primerl_hpc.common.errors import DataError


@dataclass(frozen=True)
class Row:
    place: str  # file:row, 1-based, for messages
    values: dict[str, Any]


def row_messages(row: Row) -> list[dict[str, Any]]:
    """The conversation of a row: ``messages``, else ``prompt`` + ``completion`` (each text or messages).

    Raises DataError naming file, row and the missing column.
    """
    if row.values.get("messages"):
        return _as_messages(row, "messages", role="")
    for column in ("prompt", "completion"):
        if row.values.get(column) is None:
            raise DataError(f"column '{column}' is missing, and so is 'messages'", place=row.place)
    return _as_messages(row, "prompt", role="user") + _as_messages(row, "completion", role="assistant")


def _as_messages(row: Row, column: str, *, role: str) -> list[dict[str, Any]]:
    value = row.values[column]
    if isinstance(value, str) and role:
        return [{"role": role, "content": value}]
    is_list = isinstance(value, list) and all(isinstance(each, dict) and "role" in each for each in value)
    if not is_list:
        raise DataError(f"column '{column}' must hold {'text or ' if role else ''}messages", place=row.place)
    return [{key: each for key, each in message.items() if each is not None} for message in value]


def row_tools(row: Row) -> list[dict[str, Any]] | None:
    """``tools`` or ``tool_defs``, a list or its JSON text, each as ``{"type": "function", "function": {…}}``.

    Environments hand their tools to the renderer in that shape too. Raises DataError.
    """
    column = next((name for name in ("tools", "tool_defs") if row.values.get(name)), None)
    if column is None:
        return None
    tools = _parsed(row, column)
    if not isinstance(tools, list):
        raise DataError(f"column '{column}' must hold a list of tools", place=row.place)
    return [_as_tool(row, column, tool) for tool in tools]


def _as_tool(row: Row, column: str, tool: Any) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(
            f"column '{column}': a tool has name, description and parameters, this one is {tool!r:.80}",
            place=row.place,
        )
    parameters = function.get("parameters")
    if isinstance(parameters, str):
        parameters = _parsed_text(row, column, parameters)
    kept = {key: value for key, value in function.items() if value is not None and key != "type"}
    return {"type": "function", "function": kept | ({} if parameters is None else {"parameters": parameters})}


def row_template_kwargs(row: Row) -> dict[str, Any]:
    """``chat_template_kwargs``, a mapping or its JSON text; what Parquet filled with nulls is left out."""
    if not row.values.get("chat_template_kwargs"):
        return {}
    kwargs = _parsed(row, "chat_template_kwargs")
    if not isinstance(kwargs, dict):
        raise DataError("column 'chat_template_kwargs' must hold a mapping", place=row.place)
    return {key: value for key, value in kwargs.items() if value is not None}


def check_row(row: Row) -> None:
    """Raises DataError for the first column that is not what the trainer needs."""
    row_messages(row)
    row_tools(row)
    row_template_kwargs(row)


def _parsed(row: Row, column: str) -> Any:
    value = row.values[column]
    return _parsed_text(row, column, value) if isinstance(value, str) else value


def _parsed_text(row: Row, column: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"column '{column}' holds text that is no JSON ({error})", place=row.place) from error
