"""Explain a key: its type, default and meaning, and the origin of a recipe's value. Also the JSON schema of a file.

The meaning of a field is the docstring under it. Docstrings are read from the source only when `explain` or
`json_schema` needs them, so that loading a recipe stays fast.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from primerl_hpc.common.document import with_dots
from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.common.validate import (
    all_paths,
    block_at,
    blocks_at,
    is_named,
    nearest,
    nearest_path,
    unfold,
)
from primerl_hpc.recipe.load import LoadedRecipe
from primerl_hpc.recipe.schema.recipe import Recipe


@cache
def _module_docs(module: str) -> dict[str, dict[str, str]]:
    """Return the field docstrings of a module: class → field → docstring, with its line breaks."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    docs: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        fields = docs.setdefault(node.name, {})
        for before, after in zip(node.body, node.body[1:], strict=False):
            if not isinstance(before, ast.AnnAssign) or not isinstance(before.target, ast.Name):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                fields[before.target.id] = str(after.value.value)
    return docs


def field_doc(block: type[BaseModel], name: str) -> str:
    """Return the docstring under a field of the block or its bases, else that of the block that the field holds.

    The meaning of each choice (a line that starts with its name in double backticks and a colon) is on its own line.
    """
    for base in block.__mro__:
        if doc := _module_docs(base.__module__).get(base.__name__, {}).get(name) if _is_ours(base) else None:
            return "\n".join(" ".join(part.split()) for part in re.split(r"\n\s*(?=``[^`]+``: )", doc))
    inner = [inner for inner in unfold(block.model_fields[name].annotation) if _is_block(inner)]
    return class_doc(inner[0]) if len(inner) == 1 else ""


def class_doc(block: type[BaseModel]) -> str:
    """Return the docstring of the block on one line."""
    return " ".join((block.__doc__ or "").split())


def _is_block(value: Any) -> bool:
    return _is_ours(value) and issubclass(value, BaseModel)


def _is_ours(value: Any) -> bool:
    """True for a class of this package."""
    return inspect.isclass(value) and value.__module__.startswith("primerl_hpc.")


def type_name(annotation: Any) -> str:
    """Return a readable name of a type: ``auto | integer``, ``list of block``, ``grpo | gspo``."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(str(arg) for arg in args)
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(type_name(arg) for arg in args))
    if origin is tuple:
        return f"list of {type_name(args[0])}"
    if origin is dict:
        return f"mapping of {type_name(args[0])} to {type_name(args[1])}"
    if origin is not None and args:  # Annotated
        return type_name(args[0])
    if annotation is type(None):
        return "null"
    names = {int: "integer", float: "number", str: "text", bool: "true/false", Any: "anything"}
    if annotation in names:
        return names[annotation]
    if _is_ours(annotation):
        if hasattr(annotation, "__members__"):
            return " | ".join(str(member.value) for member in annotation)
        return "block"
    return str(annotation)


def explain(root: type[BaseModel], key: str, loaded: LoadedRecipe | None = None) -> dict[str, Any]:
    """Describe ``key`` of the file format ``root``: key, type, default, meaning, keys of its block.

    ``loaded``: a recipe; adds the value that it has for the key, and the origin of the value.
    Raises NotFoundError with the nearest known key.
    """
    key = with_dots(key)
    path = tuple(part for part in key.split(".") if part)
    owner = block_at(root, path[:-1]) if path else None
    name = path[-1] if path else ""
    blocks = _owners(root, path[:-1], name) if path else []
    if not blocks:
        if instead := getattr(owner, "removed", {}).get(name):
            raise NotFoundError(f"key '{key}' was removed", hint=instead)
        near, everywhere = nearest(key, all_paths(root)), nearest_path(root, name, path[:-1])
        near = everywhere if near is None or is_named(everywhere, name) else near
        known = (
            f"did you mean '{near}'?" if near else f"known here: {', '.join((owner or root).model_fields)}"
        )
        raise NotFoundError(f"there is no key '{key}'", hint=known)
    block = blocks[0]
    field = block.model_fields[name]
    entry: dict[str, Any] = {
        "key": key,
        "type": " | ".join(dict.fromkeys(type_name(owner.model_fields[name].annotation) for owner in blocks)),
        "default": _default(field),
        "meaning": next(filter(None, (field_doc(owner, name) for owner in blocks)), "")
        or _branches(blocks, name),
    }
    inner = block_at(root, path)
    if inner is not None:
        entry["keys"] = ", ".join(inner.model_fields)
    if loaded is not None:
        entry["value"] = _value_at(loaded.recipe, path)
        entry["origin"] = loaded.document.location(path) if loaded.document.origins.get(key) else "default"
    return entry


def explain_all(root: type[BaseModel]) -> list[dict[str, Any]]:
    """Describe every key of a file format, as `explain` does."""
    return [explain(root, path) for path in all_paths(root)]


def _owners(root: type[BaseModel], path: tuple[str, ...], name: str) -> list[type[BaseModel]]:
    """Return the blocks at ``path`` that have the field: in a union (losses, optimizers), every such branch."""
    return [block for block in blocks_at(root, path) if name in block.model_fields]


def _branches(blocks: list[type[BaseModel]], name: str) -> str:
    """Return the meaning of each branch of a union, one a line, if ``name`` is the key that selects the branch."""
    if name != "type" or len(blocks) < 2:
        return ""
    return "\n".join(
        f"{type_name(block.model_fields[name].annotation)}: {class_doc(block)}" for block in blocks
    )


def _default(field: Any) -> Any:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return None
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return "null" if value is None else value


def _value_at(recipe: BaseModel, path: tuple[str, ...]) -> Any:
    value: Any = recipe.model_dump(mode="json")
    for part in path:
        if isinstance(value, list):
            value = value[int(part)] if part.isdigit() and int(part) < len(value) else None
        elif isinstance(value, dict):
            value = value.get(part)
    return value


def json_schema(root: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a file, with the docstring of each field as its description.

    A recipe may have a ``base`` that provides any key, so keys are required only within list items, which a base cannot
    complete.
    """
    schema = root.model_json_schema()
    blocks = {block.__name__: block for block in _all_blocks(root)}
    for name, definition in {**schema.get("$defs", {}), root.__name__: schema}.items():
        block = blocks.get(name)
        for field, entry in definition.get("properties", {}).items():
            if block is not None and field in block.model_fields and (doc := field_doc(block, field)):
                entry["description"] = doc
    for part in _parts(schema):
        # A block without its type matches several branches (the default type applies), which oneOf would refuse.
        if part.pop("discriminator", None):
            part["anyOf"] = part.pop("oneOf")
    if root is Recipe:
        _allow_a_base(schema)
    return schema


def _allow_a_base(schema: dict[str, Any]) -> None:
    """Add the key ``base``, and make keys optional that a base may provide."""
    texts = {"type": "array", "items": {"type": "string"}}
    schema["properties"]["base"] = {
        "anyOf": [{"type": "string"}, texts],
        "description": "Recipes that this one extends: a name or a list of names, relative to this file or shipped. "
        "Keys of this file take precedence.",
    }
    names, found = [""], set()
    for name in names:  # The list grows by every block that is reachable other than through lists.
        block = schema["$defs"][name] if name else schema
        block.pop("required", None)
        for part in _parts(block.get("properties", {}), is_in_lists=False):
            inner = str(part.get("$ref", "")).rpartition("/")[2]
            if inner and inner not in found:
                found.add(inner)
                names.append(inner)


def _parts(value: Any, *, is_in_lists: bool = True) -> Iterator[dict[str, Any]]:
    """Yield every mapping in a schema. ``is_in_lists``: including the schemas of list items."""
    if isinstance(value, dict):
        yield value
        value = [part for name, part in value.items() if is_in_lists or name not in ("items", "prefixItems")]
    if isinstance(value, list):
        for part in value:
            yield from _parts(part, is_in_lists=is_in_lists)


def _all_blocks(root: type[BaseModel]) -> list[type[BaseModel]]:
    found: list[type[BaseModel]] = [root]
    for block in found:
        for field in block.model_fields.values():
            for inner in unfold(field.annotation):
                if inspect.isclass(inner) and issubclass(inner, BaseModel) and inner not in found:
                    found.append(inner)
    return found
