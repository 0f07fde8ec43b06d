"""One row of supervised data, and the conversation, tools and template settings that it holds.

The trainer reads rows during training, and `resolve` checks the first ones before a run starts. Every error names file,
row and column.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.safety.decoding import parse_json

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that a message may have."""
TRAINED = ("weight", "train", "trainable", "training")
"""Keys of a message that say whether it is trained: true or 1, false or 0."""
IMAGE_PARTS = ("image", "image_url")
SYSTEM = ("system", "system_prompt")
"""Columns that hold the text of the system message."""
TOOLS = ("tools", "tool_defs", "functions")
"""Columns that hold the tools."""
NOT_RENDERED = (
    *("reasoning_content", "reasoning", "thinking", "tool_calls", "instruction", "input", "documents"),
    *("image", "video", "videos", "audio", "audios"),
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
    images = row.values.get("images") or []
    unnamed = iter(images if isinstance(images, list) else [images])
    messages = _conversation(row, unnamed)
    if next(unnamed, None) is not None and "images" not in ignored:
        raise DataError(
            "column 'images' has more images than the messages have parts {type: image}",
            location=row.location,
            hint="add a part where the model sees the image, or name 'images' in sft.ignored_keys",
        )
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


def _conversation(row: Row, unnamed: Iterator[Any]) -> list[dict[str, Any]]:
    if row.values.get("messages"):
        return _as_messages(row, "messages", "", unnamed)
    for column in ("prompt", "completion"):
        if row.values.get(column) is None:
            raise DataError(
                f"column '{column}' is missing, and so is 'messages'",
                location=row.location,
                hint="a row needs messages, or prompt and completion",
            )
    prompt = _as_messages(row, "prompt", "user", unnamed)
    return prompt + _as_messages(row, "completion", "assistant", unnamed)


def _as_messages(row: Row, column: str, role: str, unnamed: Iterator[Any]) -> list[dict[str, Any]]:
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
    return [
        _with_parts(row, column, number, message, unnamed) for number, message in enumerate(present, start=1)
    ]


def _with_parts(
    row: Row, column: str, number: int, message: dict[str, Any], unnamed: Iterator[Any]
) -> dict[str, Any]:
    """Return the message with one text, or with parts ``{type: text, text}`` and ``{type: image, image: source}``.

    ``unnamed``: the images of parts that have none of their own. Raises DataError for other parts.
    """
    content = message.get("content", "")
    if isinstance(content, str):
        return message
    parts: list[dict[str, Any]] = []
    for part in content if isinstance(content, list) else [content]:
        form = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if form == "text" else part
        if isinstance(text, str):
            parts.append({"type": "text", "text": text})
            continue
        source = part.get("image", part.get("image_url")) if form in IMAGE_PARTS else None
        if form in IMAGE_PARTS and source is None:
            source = next(unnamed, None)
        if isinstance(source, dict):
            source = source.get("url") or source.get("bytes") or source.get("path")
        if not isinstance(source, str | bytes):
            raise DataError(
                f"column '{column}': message {number} has content of type {form!r:.40}, which is not trained",
                location=row.location,
                hint="content is text, or a list of {type: text, text: …} and {type: image, image: …}; reasoning is "
                "in the key reasoning_content",
            )
        parts.append({"type": "image", "image": source})
    if images_of([{"content": parts}]):
        return {**message, "content": parts}
    return {**message, "content": "".join(part["text"] for part in parts)}


def images_of(messages: list[dict[str, Any]]) -> list[str | bytes]:
    """Return the sources of all images of `row_messages`, in order: data: URLs, paths, or bytes of a file."""
    return [
        part["image"]
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if part["type"] == "image"
    ]


def read_image(row: Row, source: str | bytes) -> bytes:
    """Return an image as the bytes of its file. A path is relative to the file of the row.

    Raises DataError if it cannot be read, or is elsewhere.
    """
    if isinstance(source, bytes):
        return source
    head, _, data = source.partition(",")
    try:
        if head.startswith("data:"):
            return b64decode(data, validate=True)
        return (Path(row.location.rpartition(":")[0]).parent / source).read_bytes()
    except (OSError, ValueError) as error:
        raise DataError(
            f"the image {source!r:.80} cannot be read ({error!s:.200})",
            location=row.location,
            hint="an image is a base64 data: URL, the bytes of a file, or a path relative to the data's file",
        ) from error


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
    if images_of(messages):
        raise not_rendered(row, "images", plain_renderer)
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
