"""YAML files that remember where each value came from, so that an error can name file, line and key.

    doc = load_yaml(Path("recipe.yaml"))
    doc.values["optimizer"]["lr"], doc.origins["optimizer.lr"]      # 1e-05, Origin('recipe.yaml:7')

Documents are laid over each other with `Document.overlay`: mappings merge, anything else replaces. A value of
``null`` replaces too, so an inherited block can be switched off. What `dump_yaml` writes, `load_yaml` reads as it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from primerl_hpc.common.errors import ConfigError, NotFoundError


class _Loader(yaml.SafeLoader):
    """SafeLoader with two things of YAML 1.2: ``3e-6`` is a number, as everybody who writes a learning rate expects,
    and ``12:00:00`` is text, as everybody who writes a walltime does (YAML 1.1 counts it in base 60). What looks like
    a value of some type and is none (``2024-13-45``) is a YAML error with its line, and so is a value inside itself."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=True)
        except (ValueError, AttributeError, KeyError):  # PyYAML's own constructors raise these
            kind = node.tag.rpartition(":")[2]
            problem = f"'{str(node.value)[:40]}' is no {kind}; put it in quotes if it is text"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


_BASE_60 = re.compile(r"[-+]?\d+(:[0-5]?\d)+(\.\d*)?$")
_Loader.yaml_implicit_resolvers = {
    first: list(resolvers) for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _first in "-+0123456789":
    _Loader.yaml_implicit_resolvers[_first].insert(0, ("tag:yaml.org,2002:str", _BASE_60))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that `_Loader` would take for something else."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


IsAnother = Callable[[tuple[str, ...], dict[str, Any], dict[str, Any]], bool]
"""Of a path and two mappings there: whether the upper one is another thing, which takes the place of the lower one."""


@dataclass
class Document:
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Dotted path → ``file:line``, or ``PRIMERL_X``, or ``--set``. List items are ``a.0.b``."""

    def overlay(self, above: Document, is_another: IsAnother = lambda path, low, high: False) -> Document:
        """This document with ``above`` laid over it."""
        origins = dict(self.origins)
        values = _merge(self.values, above.values, (), origins, is_another)
        origins.update(above.origins)
        return Document(values, origins)

    def place(self, path: tuple[str | int, ...]) -> str:
        """Where the value at ``path``, or the nearest block around it, was written; empty when nowhere."""
        for end in range(len(path), 0, -1):
            if origin := self.origins.get(dotted(path[:end])):
                return origin
        return self.origins.get("", "")


def dotted(path: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in path)


def load_yaml(path: Path, *, shown_as: str | None = None) -> Document:
    """Raises NotFoundError (no file), ConfigError (not YAML, not a mapping, a key twice)."""
    name = shown_as or str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise NotFoundError(f"no such file: {name}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"not a UTF-8 text file ({error.reason})", place=name) from None
    except PermissionError:
        raise NotFoundError(f"not readable: {name}") from None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        document = Document(origins={"": name})
        if node is None:
            return document
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(
                "must be a mapping of keys to values", place=f"{name}:{node.start_mark.line + 1}"
            )
        _note_origins(node, (), name, document.origins)
        document.values = loader.construct_document(node)
        return document
    except yaml.MarkedYAMLError as error:
        line = (error.problem_mark.line + 1) if error.problem_mark else 1
        raise ConfigError(f"YAML error: {error.problem}", place=f"{name}:{line}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"YAML error: the control character #x{error.character:02x} stands there", place=f"{name}:{line}"
        ) from None
    except RecursionError:
        raise ConfigError(
            "YAML error: nested too deeply, or an alias inside of what it names", place=name
        ) from None


def parse_value(text: str) -> Any:
    """A value as it would be read in YAML: ``1e-5`` a number, ``true`` a boolean, ``[a, b]`` a list; else the text."""
    try:
        return _Loader(text).get_single_data()
    except (yaml.YAMLError, RecursionError):
        return text


def from_override(path: str, text: str, origin: str, *, is_text: bool = False) -> Document:
    """A document with one value: ``optimizer.lr``, ``1e-5`` → ``{optimizer: {lr: 1e-5}}``.

    An item of a list is named by its index: ``environments.eval.0.interval``.
    ``is_text``: the key takes nothing but text, so that account ``0123`` needs no quotes; ``null`` is still null.
    """
    parts = path.split(".")
    value: Any = text if is_text and parse_value(text) is not None else parse_value(text)
    origins = {".".join(parts[:end]): origin for end in range(1, len(parts) + 1)}
    origins |= {dotted((path, *inner)): origin for inner in _paths_in(value)}
    for part in reversed(parts):
        value = {part: value}
    return Document(value, origins)


def _paths_in(value: Any) -> Iterator[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield (key,)
        yield from ((key, *inner) for inner in _paths_in(each))


def with_dots(key: str) -> str:
    """``a[0].b`` as ``a.0.b``"""
    return re.sub(r"\[(\d+)\]", r".\1", key.strip())


def dump_yaml(values: dict[str, Any]) -> str:
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False)


def _merge(
    low: dict[str, Any],
    high: dict[str, Any],
    path: tuple[str, ...],
    origins: dict[str, str],
    is_another: IsAnother,
) -> dict[str, Any]:
    merged = dict(low)
    for key, value in high.items():
        here, below = (*path, str(key)), merged.get(key)
        if isinstance(value, dict) and isinstance(below, dict) and not is_another(here, below, value):
            merged[key] = _merge(below, value, here, origins, is_another)
            continue
        if isinstance(value, dict) and value and isinstance(below, list) and _are_indices(value):
            merged[key] = _merge_items(below, value, here, origins, is_another)
            continue
        merged[key] = value
        for stale in [each for each in origins if each.startswith(dotted(here) + ".")]:
            del origins[stale]
    return merged


def _are_indices(keys: dict[str, Any]) -> bool:
    return all(str(key).isdecimal() for key in keys)


def _merge_items(
    low: list[Any],
    high: dict[str, Any],
    path: tuple[str, ...],
    origins: dict[str, str],
    is_another: IsAnother,
) -> list[Any]:
    """Raises ConfigError for an index beyond the list."""
    for index in high:
        if int(index) >= len(low):
            raise ConfigError(
                f"{dotted((*path, index))}: {dotted(path)} has {len(low)} items, counted from 0"
            )
    by_index = {str(index): item for index, item in enumerate(low)}
    changes = {str(int(index)): item for index, item in high.items()}
    return list(_merge(by_index, changes, path, origins, is_another).values())


def _note_origins(node: yaml.Node, path: tuple[str | int, ...], name: str, origins: dict[str, str]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, key.value)
            origin = f"{name}:{key.start_mark.line + 1}"
            if origins.get(dotted(here), "").startswith(f"{name}:"):
                raise ConfigError(f"key '{dotted(here)}' is written twice", place=origin)
            origins[dotted(here)] = origin
            _note_origins(value, here, name, origins)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            origins[dotted((*path, index))] = f"{name}:{value.start_mark.line + 1}"
            _note_origins(value, (*path, index), name, origins)
