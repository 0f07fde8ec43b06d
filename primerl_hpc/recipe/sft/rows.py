"""One row of supervised data, and the conversation, tools and template settings that it holds.

The trainer reads rows during training, and `resolve` checks the first ones before a run starts. Every error names file,
row and column.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeGuard

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.safety.decoding import parse_json

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that a message may have."""
TRAINED = ("weight", "train", "trainable", "training")
"""Keys of a message that say whether it is trained: true or 1, false or 0."""
SYSTEM = ("system", "system_prompt")
"""Columns that hold the text of the system message."""
TOOLS = ("tools", "tool_defs", "functions")
"""Columns that hold the tools."""
NOT_RENDERED = (
    *("reasoning_content", "reasoning", "thinking", "tool_calls", "instruction", "input", "documents"),
    *("image", "images", "video", "videos", "audio", "audios"),
)
"""Columns with content for the model in common datasets, which no renderer gets."""
LINKS = {"tool": ("tool_call_id", "name")}
"""Role → keys that connect a message with another one, and have no tokens in most formats."""


@dataclass(frozen=True)
class Row:
    """A row of a file or dataset."""

    location: str
    """``file:row``, counted from 1, for error messages."""
    values: dict[str, Any]
    """Column → value."""


def row_messages(row: Row, ignored: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the conversation of a row: ``messages``, else ``prompt`` + ``completion`` (each text or messages).

    A column of `SYSTEM` is its first message. ``ignored``: ``sft.ignored_keys``.

    Raises DataError with file, row and the missing column, the message whose role is not one of `ROLES`, or a column of
    `NOT_RENDERED`.
    """
    for column in (name for name in NOT_RENDERED if row.values.get(name) and name not in ignored):
        raise DataError(
            f"column '{column}' would not be rendered",
            location=row.location,
            hint="move it into the messages, or, if it is not meant for the model, name it in sft.ignored_keys",
        )
    messages = _conversation(row)
    for column in (name for name in SYSTEM if row.values.get(name) and name not in ignored):
        text = row.values[column]
        has_system = bool(messages) and messages[0]["role"] in ("system", "developer")
        if not isinstance(text, str) or (has_system and messages[0].get("content") != text):
            raise DataError(
                f"column '{column}' holds no text, or another one than the system message of the conversation",
                location=row.location,
                hint=f"remove one of them, or name '{column}' in sft.ignored_keys",
            )
        messages = messages if has_system else [{"role": "system", "content": text}, *messages]
    return messages


def _conversation(row: Row) -> list[dict[str, Any]]:
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
    present = [{key: item for key, item in message.items() if item is not None} for message in value]
    return [_with_text(row, column, number, message) for number, message in enumerate(present, start=1)]


def _with_text(row: Row, column: str, number: int, message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with the text of its parts, if its content is a list. Raises DataError for other parts."""
    content = message.get("content", "")
    if isinstance(content, str):
        return message
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        is_part = isinstance(part, dict)
        text = part.get("text") if is_part and part.get("type") == "text" else part
        if not isinstance(text, str):
            form = part.get("type") if is_part else type(part).__name__
            raise DataError(
                f"column '{column}': message {number} has content of type {form!r:.40}, which is not trained",
                location=row.location,
                hint="content is text, or a list of {type: text, text: …}; reasoning is in the key reasoning_content",
            )
        texts.append(text)
    return {**message, "content": "".join(texts)}


def trained_turns(
    row: Row, messages: list[dict[str, Any]], ignored: Collection[str] = ()
) -> tuple[list[dict[str, Any]], list[bool]]:
    """Return the messages without the keys `TRAINED`, and for each whether these keys let it be trained.

    They may also be columns of the row, then for all messages, unless they are ``ignored``. Raises DataError for
    another value than true, false, 1 and 0: a message is trained completely or not at all.
    """
    columns = {key: value for key, value in row.values.items() if value is not None and key not in ignored}
    is_row_trained = _is_trained(row, "the row", columns)
    turns = [
        _is_trained(row, f"message {number}", message) for number, message in enumerate(messages, start=1)
    ]
    without = [{key: item for key, item in message.items() if key not in TRAINED} for message in messages]
    return without, [is_row_trained and turn for turn in turns]


def _is_trained(row: Row, place: str, values: dict[str, Any]) -> bool:
    flags = {key: values[key] for key in TRAINED if key in values}
    for key, value in flags.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise DataError(
                f"{place} has {key} {value!r:.40}",
                location=row.location,
                hint="a message is trained completely (1 or true) or not at all (0 or false); a column with another "
                "meaning can be named in sft.ignored_keys",
            )
    return all(flags.values())


def meaningful_keys(message: dict[str, Any], ignored: Collection[str]) -> list[str]:
    """Return the keys of a message, besides role and content, that must have an effect on its tokens."""
    links = LINKS.get(message["role"], ())
    without = {"role", "content", *TRAINED, *links, *ignored}
    return [key for key, value in message.items() if key not in without and value not in ("", [], {})]


def _is_list_of_messages(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and all(
        isinstance(message, dict) and "role" in message for message in value
    )


def not_rendered(row: Row, part: str, renderer: str) -> DataError:
    """Return the error for a row with a ``part`` that ``renderer`` does not render."""
    return DataError(
        f"the row has {part}, which {renderer} does not render",
        location=row.location,
        hint="set model.renderer.name to the model's family, remove it from the rows, or name a key that is not meant "
        "for the model in sft.ignored_keys",
    )


def row_tools(row: Row, ignored: Collection[str] = ()) -> list[dict[str, Any]] | None:
    """Return the tools of a row (one of the columns `TOOLS`: a list, or its JSON text), or None.

    Each tool has the form ``{"type": "function", "function": {…}}``, as the tools of environments do. ``ignored``:
    ``sft.ignored_keys``. Raises DataError, also for two columns with different tools.
    """
    columns = [name for name in TOOLS if row.values.get(name) and name not in ignored]
    tools = [_tools_of(row, column) for column in columns]
    for column, others in zip(columns, tools, strict=True):
        if others != tools[0]:
            raise DataError(
                f"column '{column}' holds other tools than column '{columns[0]}'",
                location=row.location,
                hint="remove one of them, or name it in sft.ignored_keys",
            )
    return tools[0] if tools else None


def _tools_of(row: Row, column: str) -> list[dict[str, Any]]:
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


def check_row(row: Row, plain_renderer: str | None = None, ignored: Collection[str] = ()) -> None:
    """Raise DataError for the first column that the trainer could not use.

    ``plain_renderer``: description of the renderer if it is known to render roles and content only; ``ignored``:
    ``sft.ignored_keys``.
    """
    messages, tools = row_messages(row, ignored), row_tools(row, ignored)
    row_template_kwargs(row)
    trained_turns(row, messages, ignored)
    if plain_renderer is None:
        return
    if tools:
        raise not_rendered(row, "tools", plain_renderer)
    for number, message in enumerate(messages, start=1):
        for key in meaningful_keys(message, ignored):
            raise not_rendered(row, f"{key} in message {number}", plain_renderer)


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
