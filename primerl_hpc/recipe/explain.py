"""What a key means: its type, default, docstring, and where a recipe's value came from.

The meaning of a field is the docstring under it. Those are read from the source when somebody asks, so that loading a
recipe does not pay for them.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

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
from primerl_hpc.common.yamldoc import with_dots
from primerl_hpc.recipe.load import LoadedRecipe
from primerl_hpc.recipe.schema import Recipe


@cache
def _module_docs(module: str) -> dict[str, dict[str, str]]:
    """Class → field → docstring, of one module."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    docs: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        fields = docs.setdefault(node.name, {})
        for before, after in zip(node.body, node.body[1:], strict=False):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and is_text:
                fields[before.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return docs


def field_doc(block: type[BaseModel], name: str) -> str:
    """The docstring under a field, looked up along the class's bases."""
    for each in block.__mro__:
        if doc := _module_docs(each.__module__).get(each.__name__, {}).get(name) if _is_ours(each) else None:
            return doc
    inner = [each for each in unfold(block.model_fields[name].annotation) if _is_block(each)]
    return class_doc(inner[0]) if len(inner) == 1 else ""


def class_doc(block: type[BaseModel]) -> str:
    """The block's own docstring, not that of a base."""
    return " ".join((block.__doc__ or "").split())


def _is_block(each: Any) -> bool:
    return _is_ours(each) and issubclass(each, BaseModel)


def _is_ours(each: Any) -> bool:
    return inspect.isclass(each) and each.__module__.startswith("primerl_hpc.")


def type_name(annotation: Any) -> str:
    """A type in words: ``auto | integer``, ``list of train environment``, ``grpo | gspo``."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(str(each) for each in args)
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(type_name(each) for each in args))
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
            return " | ".join(str(each.value) for each in annotation)
        return "block"
    return str(annotation)


def explain(root: type[BaseModel], key: str, loaded: LoadedRecipe | None = None) -> dict[str, Any]:
    """Raises NotFoundError with the nearest key."""
    key = with_dots(key)
    path = tuple(part for part in key.split(".") if part)
    owner = block_at(root, path[:-1]) if path else None
    name = path[-1] if path else ""
    blocks = _owners(root, path[:-1], name) if path else []
    if not blocks:
        near, everywhere = nearest(key, all_paths(root)), nearest_path(root, name)
        near = everywhere if near is None or is_named(everywhere, name) else near
        known = (
            f"did you mean '{near}'?" if near else f"known here: {', '.join((owner or root).model_fields)}"
        )
        raise NotFoundError(f"no key '{key}'", mend=known)
    block = blocks[0]
    field = block.model_fields[name]
    entry: dict[str, Any] = {
        "key": key,
        "type": " | ".join(dict.fromkeys(type_name(each.model_fields[name].annotation) for each in blocks)),
        "default": _default(field),
        "meaning": next(filter(None, (field_doc(each, name) for each in blocks)), "")
        or _branches(blocks, name),
    }
    inner = block_at(root, path)
    if inner is not None:
        entry["keys"] = ", ".join(inner.model_fields)
    if loaded is not None:
        entry["value"] = _value_at(loaded.recipe, path)
        entry["origin"] = loaded.document.place(path) if loaded.document.origins.get(key) else "default"
    return entry


def explain_all(root: type[BaseModel]) -> list[dict[str, Any]]:
    return [explain(root, path) for path in all_paths(root)]


def _owners(root: type[BaseModel], path: tuple[str, ...], name: str) -> list[type[BaseModel]]:
    """Blocks at ``path`` that have the field: of a union (losses, optimizers) every branch that knows it."""
    return [each for each in blocks_at(root, path) if name in each.model_fields]


def _branches(blocks: list[type[BaseModel]], name: str) -> str:
    """Of the key that tells the branches of a union apart: what each branch is."""
    if name != "type" or len(blocks) < 2:
        return ""
    return "\n".join(f"{type_name(each.model_fields[name].annotation)}: {class_doc(each)}" for each in blocks)


def _default(field: Any) -> Any:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return None
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
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
    """The JSON schema of a file, with each field's docstring as its description.

    Of a recipe that may name a ``base``: what that may say is required only in the items of lists, which it cannot complete.
    """
    schema = root.model_json_schema()
    blocks = {each.__name__: each for each in _all_blocks(root)}
    for name, definition in {**schema.get("$defs", {}), root.__name__: schema}.items():
        block = blocks.get(name)
        for field, entry in definition.get("properties", {}).items():
            if block is not None and field in block.model_fields and (doc := field_doc(block, field)):
                entry["description"] = doc
    for part in _parts(schema):
        if part.pop(
            "discriminator", None
        ):  # a block without its type fits several branches: its default counts
            part["anyOf"] = part.pop("oneOf")
    if root is Recipe:
        _allow_a_base(schema)
    return schema


def _allow_a_base(schema: dict[str, Any]) -> None:
    texts = {"type": "array", "items": {"type": "string"}}
    schema["properties"]["base"] = {
        "anyOf": [{"type": "string"}, texts],
        "description": "Recipes that this one is laid over: a name or a list, relative to this file or shipped.",
    }
    names, found = [""], set()
    for name in names:  # grows: every block on the way, but for those in lists alone
        block = schema["$defs"][name] if name else schema
        block.pop("required", None)
        for part in _parts(block.get("properties", {}), is_in_lists=False):
            inner = str(part.get("$ref", "")).rpartition("/")[2]
            if inner and inner not in found:
                found.add(inner)
                names.append(inner)


def _parts(value: Any, *, is_in_lists: bool = True) -> Iterator[dict[str, Any]]:
    """Every mapping in a schema; ``is_in_lists``: also in what it says about the items of lists."""
    if isinstance(value, dict):
        yield value
        value = [each for name, each in value.items() if is_in_lists or name not in ("items", "prefixItems")]
    if isinstance(value, list):
        for each in value:
            yield from _parts(each, is_in_lists=is_in_lists)


def _all_blocks(root: type[BaseModel]) -> list[type[BaseModel]]:
    found: list[type[BaseModel]] = [root]
    for block in found:
        for field in block.model_fields.values():
            for each in unfold(field.annotation):
                if inspect.isclass(each) and issubclass(each, BaseModel) and each not in found:
                    found.append(each)
    return found
