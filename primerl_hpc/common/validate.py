"""From a `Document` to a frozen block, or one sentence: file, line, key, what is wrong, nearest known key."""

from __future__ import annotations

import difflib
import math
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.yamldoc import Document, dotted

B = TypeVar("B", bound=BaseModel)


def validate(block: type[B], document: Document) -> B:
    """Raises ConfigError for the first fault in file order (more faults are counted in the sentence)."""
    try:
        return block.model_validate(document.values)
    except ValidationError as error:
        raise _first_fault(block, document, error.errors()) from None


def _first_fault(block: type[BaseModel], document: Document, faults: list[ErrorDetails]) -> ConfigError:
    described = [_describe(block, document, fault) for fault in _merge_union_branches(block, faults)]
    # of two faults of one line the misspelt key explains the missing one
    described.sort(key=lambda fault: (_line_number(fault.place), not fault.cause.startswith("unknown key")))
    first = described[0]
    if len(described) > 1:
        first.cause += f" (and {len(described) - 1} more)"
    return first


def _line_number(place: str) -> tuple[str, float]:
    """What a whole file lacks comes after what its lines have too much."""
    name, _, line = place.rpartition(":")
    return (name, int(line)) if line.isdigit() else (place, math.inf)


def _merge_union_branches(block: type[BaseModel], faults: list[ErrorDetails]) -> list[ErrorDetails]:
    """A union reports a fault per branch; keep one per key, with the expectations joined."""
    kept: dict[str, ErrorDetails] = {}
    for fault in faults:
        path = _fault_path(block, fault)
        known = kept.get(dotted(path))
        if known is None:
            kept[dotted(path)] = dict(fault)  # type: ignore[assignment]
        elif known["msg"] != fault["msg"]:
            known["msg"] += " or " + fault["msg"].removeprefix("Input should be ")
    return list(kept.values())


def _describe(block: type[BaseModel], document: Document, fault: ErrorDetails) -> ConfigError:
    path = _fault_path(block, fault)
    key = dotted(path)
    place = document.place(path)
    if fault["type"] == "extra_forbidden":
        return ConfigError(
            f"unknown key '{key}'", place=place, mend=_mend_of_unknown(block, path, fault["loc"])
        )
    if fault["type"] == "missing":
        return ConfigError(f"key '{key}' is missing", place=place)
    message = fault["msg"].removeprefix("Value error, ")
    if not path:
        return ConfigError(message, place=place)
    message = message.replace("Input should be ", "must be ").replace("input should be ", "")
    message = message.replace("a valid tuple", "a list")
    value = fault.get("input")
    got = "" if isinstance(value, dict | list) else f", not {value!r}"
    if fault["type"] in ("model_type", "model_attributes_type", "dict_type"):
        message, got = "must be a mapping", f", not {value!r}"
    if fault["type"] == "union_tag_invalid":
        context = fault.get("ctx", {})
        key, message = (
            f"{key}.type",
            f"must be one of {context.get('expected_tags')}, not {context.get('tag')!r}",
        )
        got = ""
    if fault["type"] == "union_tag_not_found":
        tags = ", ".join(tag_of(each) for each in blocks_at(block, path))
        return ConfigError(f"key '{key}.type' is missing", place=place, mend=f"it is one of {tags}")
    return ConfigError(f"{key}: {message}{got if 'must be' in message else ''}", place=place)


def _fault_path(block: type[BaseModel], fault: ErrorDetails) -> tuple[str | int, ...]:
    """An unknown key is the last part of its location, however it is spelt."""
    loc = fault["loc"]
    if fault["type"] == "extra_forbidden":
        return (*yaml_path(block, loc[:-1]), loc[-1])
    return yaml_path(block, loc)


def _mend_of_unknown(block: type[BaseModel], path: tuple[str | int, ...], loc: tuple[str | int, ...]) -> str:
    """Where a key belongs that its block does not know; ``loc`` names the branch of a union."""
    above, word = path[:-1], str(path[-1])
    blocks = blocks_at(block, above)
    if types := [tag_of(each) for each in blocks if word in each.model_fields and tag_of(each)]:
        return f"it belongs to {dotted((*above, 'type'))} {' and '.join(types)}"
    nested = (*(part for part in above if isinstance(part, str)), word)
    if "." in word and dotted(nested) in all_paths(block):
        outer, *inner = word.split(".")
        return f"write it nested: {outer}: {{{': {'.join(inner)}: …{'}' * len(inner)}"
    written = [each for each in blocks if tag_of(each) and tag_of(each) in loc[-2:-1]]
    owner = next(iter(written), None) or block_at(block, above)
    near = nearest(word, list(owner.model_fields)) if owner else None
    everywhere = nearest_path(block, word)
    if near and not is_named(everywhere, word):
        return f"did you mean '{dotted((*above, near))}'?"
    if everywhere:
        return f"did you mean '{everywhere}'?"
    return f"known here: {', '.join(owner.model_fields)}" if owner else ""


def tag_of(block: type[BaseModel]) -> str:
    """What ``type`` a branch of a union is for; empty for a block that is in none."""
    tag = block.model_fields.get("type")
    return str(tag.default) if tag is not None and tag.default is not PydanticUndefined else ""


def yaml_path(block: type[BaseModel], loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """pydantic's location without the names of union branches (``loss.dppo.mask_low`` → ``loss.mask_low``)."""
    path: list[str | int] = []
    current: list[Any] = [block]
    for part in loc:
        if isinstance(part, int):
            path.append(part)
            continue
        owners = [each for each in current if _is_block(each)]
        fields = [each.model_fields[part].annotation for each in owners if part in each.model_fields]
        if fields:
            path.append(part)
            current = [each for annotation in fields for each in unfold(annotation)]
        elif any(_is_branch(each, part) for each in current):
            current = [each for each in current if _is_branch(each, part)] or current
        elif owners or any(get_origin(each) is dict for each in current):
            path.append(part)  # an unknown key of a block, or a key of a free mapping
            current = _inside(current, part)
    return tuple(path)


def _is_branch(candidate: Any, name: str) -> bool:
    if not name.isidentifier():  # "tuple[X, ...]", or a tag made for people
        return True
    if _is_block(candidate):
        tag = candidate.model_fields.get("type")
        return candidate.__name__ == name or (tag is not None and tag.default == name)
    return name in ("int", "float", "bool", "str", "constrained-int")


def _is_block(candidate: Any) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, BaseModel)


def unfold(annotation: Any) -> list[Any]:
    """Every type an annotation may hold: the branches of unions, the items of tuples, annotated types plain; mappings whole."""
    args = get_args(annotation)
    if not args or get_origin(annotation) is dict:
        return [annotation]
    return [each for arg in args if arg is not Ellipsis for each in unfold(arg)]


def blocks_at(block: type[BaseModel], path: tuple[str | int, ...]) -> list[type[BaseModel]]:
    """The blocks whose keys may live under ``path``: of a union every branch; none for free mappings."""
    return [each for each in _types_at(block, path) if _is_block(each)]


def _types_at(block: type[BaseModel], path: tuple[str | int, ...]) -> list[Any]:
    current: list[Any] = [block]
    for part in path:
        if not (isinstance(part, int) or str(part).isdecimal()):
            current = _inside(current, str(part))
    return current


def _inside(owners: list[Any], key: str) -> list[Any]:
    """What a key of any of ``owners`` may hold."""
    found: list[Any] = []
    for owner in owners:
        if _is_block(owner) and key in owner.model_fields:
            found += unfold(owner.model_fields[key].annotation)
        elif get_origin(owner) is dict:
            found += unfold(get_args(owner)[1])
    return found


def block_at(block: type[BaseModel], path: tuple[str | int, ...]) -> type[BaseModel] | None:
    """Of the `blocks_at` the path the one with most keys; None for free mappings."""
    return max(blocks_at(block, path), key=lambda each: len(each.model_fields), default=None)


def is_text(block: type[BaseModel], key: str) -> bool:
    """Whether the key takes text and nothing else (but null)."""
    path = tuple(key.split("."))
    if is_variable(block, key):
        return True
    owner = block_at(block, path[:-1])
    if owner is None or path[-1] not in owner.model_fields:
        return False
    annotation = owner.model_fields[path[-1]].annotation
    branches = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    plain = {each.__origin__ if hasattr(each, "__metadata__") else each for each in branches}
    return plain - {type(None)} == {str}


def is_variable(block: type[BaseModel], key: str) -> bool:
    """Whether the key is the name of an environment variable, in a mapping of such names to text."""
    return dict[str, str] in _types_at(block, tuple(key.split("."))[:-1])


def from_variable(block: type[BaseModel], name: str) -> str:
    """``LOSS__KL_TAU`` → ``loss.kl_tau``; ``ENV__HF_HOME`` → ``env.HF_HOME``, for the case of such a name counts."""
    above, dot, last = name.replace("__", ".").rpartition(".")
    key = f"{above.lower()}{dot}{last}"
    return key if is_variable(block, key) else key.lower()


def nearest(word: str, known: list[str]) -> str | None:
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return found[0] if found else None


def nearest_path(block: type[BaseModel], word: str) -> str | None:
    """A key of that name, or nearly, anywhere in the tree: for settings written one level too high or low."""
    paths = all_paths(block)
    by_name = {path.rsplit(".", 1)[-1]: path for path in reversed(paths)}
    found = nearest(word, list(by_name))
    return by_name[found] if found else None


def is_named(path: str | None, word: str) -> bool:
    """Whether the key at ``path`` has exactly that name: then it is meant, whatever else is spelt alike."""
    return path is not None and path.rsplit(".", 1)[-1] == word


def all_paths(block: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted paths of every key, blocks inside lists as ``a.b`` without index."""
    paths: list[str] = []
    for name, field in block.model_fields.items():
        path = f"{prefix}{name}"
        if path not in paths:
            paths.append(path)
        for each in unfold(field.annotation):
            if _is_block(each):
                paths += [p for p in all_paths(each, f"{path}.") if p not in paths]
    return paths
