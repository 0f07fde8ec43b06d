"""Validate a `Document` as a frozen block. Errors name file, line, key, the problem and the nearest known key."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from primerl_hpc.common.block import VariableMap
from primerl_hpc.common.document import Document, dotted, refuse_odd_text, refuse_secrets
from primerl_hpc.common.env import Override
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.safety.secret_values import mask_data

B = TypeVar("B", bound=BaseModel)
MOST_NAMED = 8


def validate(block: type[B], document: Document) -> B:
    """Return the validated block. Raises ConfigError for the first fault in file order and lists the others after
    it."""
    refuse_odd_text(document)  # overrides were not checked when the file was loaded
    try:
        validated = block.model_validate(document.values)
    except ValidationError as error:
        raise _first_fault(block, document, error.errors()) from None
    refuse_secrets(document)
    return validated


def _first_fault(block: type[BaseModel], document: Document, faults: list[ErrorDetails]) -> ConfigError:
    described = [_describe(block, document, fault) for fault in _merge_union_branches(block, faults)]
    # if two faults are on one line, the misspelled key explains the missing one
    described.sort(
        key=lambda fault: (_line_number(fault.location), not fault.cause.startswith("unknown key"))
    )
    first = described[0]
    if others := described[1:]:
        named = "; ".join(_in_brackets(fault) for fault in others[:MOST_NAMED])
        more = f"; and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
        first.hint = "; ".join(filter(None, (first.hint, f"also {named}{more}")))
    return first


def _in_brackets(fault: ConfigError) -> str:
    hint = f" ({fault.hint})" if fault.hint else ""
    return f"{fault.location}: {fault.cause}{hint}"


def _line_number(location: str) -> tuple[str, float]:
    """Sort key of a location: faults of the file itself, such as missing keys, come after those of its lines."""
    name, _, line = location.rpartition(":")
    return (name, int(line)) if line.isdigit() else (location, math.inf)


def _merge_union_branches(block: type[BaseModel], faults: list[ErrorDetails]) -> list[ErrorDetails]:
    """Merge the faults of a union, which has one for each branch, into one for each key."""
    kept: dict[str, ErrorDetails] = {}
    for fault in faults:
        path = _fault_path(block, fault)
        known = kept.get(dotted(path))
        if known is None:
            kept[dotted(path)] = fault.copy()
        elif known["msg"] != fault["msg"]:
            known["msg"] += " or " + fault["msg"].removeprefix("Input should be ")
    return list(kept.values())


def _describe(block: type[BaseModel], document: Document, fault: ErrorDetails) -> ConfigError:
    path = _fault_path(block, fault)
    key = dotted(path)
    location = document.location(path)
    if fault["type"] == "extra_forbidden":
        owner = block_at(block, path[:-1])
        if instead := getattr(owner, "removed", {}).get(str(path[-1])):
            return ConfigError(f"key '{key}' was removed", location=location, hint=instead)
        return ConfigError(
            f"unknown key '{key}'", location=location, hint=_hint_for_unknown(block, path, fault["loc"])
        )
    if fault["type"] == "missing":
        return ConfigError(f"key '{key}' is missing", location=location)
    message = fault["msg"].removeprefix("Value error, ")
    if not path:
        return ConfigError(message, location=location)
    message = message.replace("Input should be ", "must be ").replace("input should be ", "")
    message = message.replace("a valid tuple", "a list")
    value = mask_data(fault.get("input"), key)
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
        tags = ", ".join(tag_of(branch) for branch in blocks_at(block, path))
        return ConfigError(f"key '{key}.type' is missing", location=location, hint=f"one of {tags}")
    return ConfigError(f"{key}: {message}{got if 'must be' in message else ''}", location=location)


def _fault_path(block: type[BaseModel], fault: ErrorDetails) -> tuple[str | int, ...]:
    """Return the path of a fault in the document. An unknown key is the last part of the location, even with dots."""
    loc = fault["loc"]
    if fault["type"] == "extra_forbidden":
        return (*yaml_path(block, loc[:-1]), loc[-1])
    return yaml_path(block, loc)


def _hint_for_unknown(block: type[BaseModel], path: tuple[str | int, ...], loc: tuple[str | int, ...]) -> str:
    """Return a suggestion for an unknown key; ``loc`` contains the branch of a union."""
    above, word = path[:-1], str(path[-1])
    blocks = blocks_at(block, above)
    if types := [tag_of(branch) for branch in blocks if word in branch.model_fields and tag_of(branch)]:
        return f"it is a key of {dotted((*above, 'type'))} {' and '.join(types)}"
    nested = (*(part for part in above if isinstance(part, str)), word)
    if "." in word and dotted(nested) in all_paths(block):
        outer, *inner = word.split(".")
        return f"write it nested: {outer}: {{{': {'.join(inner)}: …{'}' * len(inner)}"
    selected = [branch for branch in blocks if tag_of(branch) and tag_of(branch) in loc[-2:-1]]
    owner = next(iter(selected), None) or block_at(block, above)
    near = nearest(word, list(owner.model_fields)) if owner else None
    everywhere = nearest_path(block, word, above)
    if near and not is_named(everywhere, word):
        return f"did you mean '{dotted((*above, near))}'?"
    if everywhere:
        return f"did you mean '{everywhere}'?"
    return f"known keys: {', '.join(owner.model_fields)}" if owner else ""


def tag_of(block: type[BaseModel]) -> str:
    """Return the ``type`` that selects this branch of a union; empty for a block outside unions."""
    tag = block.model_fields.get("type")
    return str(tag.default) if tag is not None and tag.default is not PydanticUndefined else ""


def yaml_path(block: type[BaseModel], loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Remove the names of union branches from pydantic's location (``loss.dppo.mask_low`` → ``loss.mask_low``)."""
    path: list[str | int] = []
    current: list[Any] = [block]
    for part in loc:
        if isinstance(part, int):
            path.append(part)
            continue
        owners = [candidate for candidate in current if _is_block(candidate)]
        fields = [
            candidate.model_fields[part].annotation for candidate in owners if part in candidate.model_fields
        ]
        if fields:
            path.append(part)
            current = [candidate for annotation in fields for candidate in unfold(annotation)]
        elif any(_is_branch(candidate, part) for candidate in current):
            current = [candidate for candidate in current if _is_branch(candidate, part)] or current
        elif owners or any(get_origin(candidate) is dict for candidate in current):
            path.append(part)  # an unknown key of a block, or a key of a free mapping
            current = _inside(current, part)
    return tuple(path)


def _is_branch(candidate: Any, name: str) -> bool:
    if not name.isidentifier():  # "tuple[X, ...]", or a tag that is not a class name
        return True
    if _is_block(candidate):
        tag = candidate.model_fields.get("type")
        return candidate.__name__ == name or (tag is not None and tag.default == name)
    return name in ("int", "float", "bool", "str", "constrained-int")


def _is_block(candidate: Any) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, BaseModel)


def unfold(annotation: Any) -> list[Any]:
    """Return all types in an annotation: branches of unions, items of tuples, annotated types; mappings unchanged."""
    args = get_args(annotation)
    if not args or get_origin(annotation) is dict:
        return [annotation]
    return [candidate for arg in args if arg is not Ellipsis for candidate in unfold(arg)]


def blocks_at(block: type[BaseModel], path: tuple[str | int, ...]) -> list[type[BaseModel]]:
    """Return the blocks at ``path``: all branches of a union; none for free mappings."""
    return [candidate for candidate in _types_at(block, path) if _is_block(candidate)]


def _types_at(block: type[BaseModel], path: tuple[str | int, ...]) -> list[Any]:
    current: list[Any] = [block]
    for part in path:
        if not (isinstance(part, int) or str(part).isdecimal()):
            current = _inside(current, str(part))
    return current


def _inside(owners: list[Any], key: str) -> list[Any]:
    """Return the types that a key of any of ``owners`` may have."""
    found: list[Any] = []
    for owner in owners:
        if _is_block(owner) and key in owner.model_fields:
            found += unfold(owner.model_fields[key].annotation)
        elif get_origin(owner) is dict:
            found += unfold(get_args(owner)[1])
    return found


def block_at(block: type[BaseModel], path: tuple[str | int, ...]) -> type[BaseModel] | None:
    """Return the block at ``path`` with the most keys; None for free mappings."""
    return max(blocks_at(block, path), key=lambda candidate: len(candidate.model_fields), default=None)


def is_text(block: type[BaseModel], key: str) -> bool:
    """True if the key accepts only text, or null."""
    path = tuple(key.split("."))
    if is_variable(block, key):
        return True
    owner = block_at(block, path[:-1])
    if owner is None or path[-1] not in owner.model_fields:
        return False
    annotation = owner.model_fields[path[-1]].annotation
    branches = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    plain = {
        get_args(candidate)[0] if get_origin(candidate) is Annotated else candidate for candidate in branches
    }
    return plain - {type(None)} == {str}


def is_variable(block: type[BaseModel], key: str) -> bool:
    """True if the key is an environment variable in a mapping of variables."""
    return VariableMap in _types_at(block, tuple(key.split("."))[:-1])


def from_variable(block: type[BaseModel], name: str) -> str:
    """Convert ``LOSS__KL_TAU`` to ``loss.kl_tau`` and ``ENV__HF_HOME`` to ``env.HF_HOME`` (variables are
    case-sensitive)."""
    above, dot, last = name.replace("__", ".").rpartition(".")
    key = f"{above.lower()}{dot}{last}"
    return key if is_variable(block, key) else key.lower()


Change = tuple[str, str, str]
"""Key, value and origin of an override."""


def split_variables(
    block: type[BaseModel], document: Document, variables: Sequence[Override]
) -> tuple[list[Change], tuple[str, ...]]:
    """Return the changes of the variables whose keys ``document``, of files, leaves open, and warnings about the
    others.

    A block in a file without ``type`` has the default type, so a variable does not change it.
    """
    changes: list[Change] = []
    warnings = []
    for name, rest, value in variables:
        key = from_variable(block, rest)
        above, _, last = key.rpartition(".")
        origin = document.origin_of(key)
        if origin is None and last == "type" and len(blocks_at(block, tuple(above.split(".")))) > 1:
            origin = document.origin_of(above)
        if origin is None:
            changes.append((key, value, name))
        else:
            warnings.append(
                f"{name} is ignored because {origin} sets {key}; files take precedence over variables now"
            )
    return changes, tuple(warnings)


def nearest(word: str, known: list[str]) -> str | None:
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return found[0] if found else None


def nearest_path(block: type[BaseModel], word: str, above: Sequence[str | int] = ()) -> str | None:
    """Return the path of a key with this or a similar name anywhere in the tree, for keys at the wrong level.

    Of several, the one that shares most blocks with the path ``above`` it.
    """
    names = {path: path.rsplit(".", 1)[-1] for path in all_paths(block)}
    found = nearest(word, list(dict.fromkeys(names.values())))
    paths = [path for path, name in names.items() if name == found]
    return max(paths, key=lambda path: len({*path.split(".")} & {*above}), default=None)


def is_named(path: str | None, word: str) -> bool:
    """True if the key at ``path`` has exactly this name, which then takes precedence over similar names."""
    return path is not None and path.rsplit(".", 1)[-1] == word


def all_paths(block: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the dotted paths of all keys, without the indices of lists."""
    paths: list[str] = []
    for name, field in block.model_fields.items():
        path = f"{prefix}{name}"
        if path not in paths:
            paths.append(path)
        for candidate in unfold(field.annotation):
            if _is_block(candidate):
                paths += [p for p in all_paths(candidate, f"{path}.") if p not in paths]
    return paths
