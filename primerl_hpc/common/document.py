"""YAML files with the origin of each value, so that an error can name file, line and key.

    doc = load_yaml(Path("recipe.yaml"))
    doc.values["optimizer"]["lr"], doc.origins["optimizer.lr"]      # 1e-05, Origin('recipe.yaml:7')

`Document.overlay` combines documents: mappings are merged, other values are replaced. ``null`` replaces a value too, so
that an inherited block can be disabled. `load_yaml` reads the output of `dump_yaml` unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from primerl_hpc.common.errors import ConfigError, NotFoundError
from primerl_hpc.common.safety.odd_text import BIDIRECTIONAL, describe, odd_character, shown
from primerl_hpc.common.safety.secret_values import has_secret_form, is_named_secret


class _YamlLoader(yaml.SafeLoader):
    """SafeLoader with two rules of YAML 1.2: ``3e-6`` is a number, and ``12:00:00`` is text.

    YAML 1.1 reads the latter, a walltime, as a number in base 60.
    Invalid values of an implicit type (``2024-13-45``) and recursive aliases are YAML errors with a line number.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=True)
        except (ValueError, AttributeError, KeyError):  # raised by PyYAML's constructors
            kind = node.tag.rpartition(":")[2]
            problem = f"'{str(node.value)[:40]}' is not a valid {kind}; quote it if it is text"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


_BASE_60 = re.compile(r"[-+]?\d+(:[0-5]?\d)+(\.\d*)?$")
_YamlLoader.yaml_implicit_resolvers = {
    first: list(resolvers) for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _first in "-+0123456789":
    _YamlLoader.yaml_implicit_resolvers[_first].insert(0, ("tag:yaml.org,2002:str", _BASE_60))
_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


class _YamlDumper(yaml.SafeDumper):
    """SafeDumper that quotes texts which `_YamlLoader` would read as another type or with other line breaks."""

    yaml_implicit_resolvers = _YamlLoader.yaml_implicit_resolvers

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # PyYAML writes a NEL between single quotes, where it is read as a blank
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if "\x85" in data else None)


_YamlDumper.add_representer(str, _YamlDumper.represent_str)


IsAnother = Callable[[tuple[str, ...], dict[str, Any], dict[str, Any]], bool]
"""Called with a path, the lower and the upper mapping at that path: True if the upper one replaces the lower one."""


@dataclass
class Document:
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Dotted path → ``file:line``, or ``PRIMERL_X``, or ``--set``. List items are ``a.0.b``."""

    def overlay(self, above: Document, is_another: IsAnother = lambda path, low, high: False) -> Document:
        """Return this document with the values of ``above`` merged over it."""
        origins = dict(self.origins)
        values = _merge(self.values, above.values, (), origins, is_another)
        origins.update(above.origins)
        return Document(values, origins)

    def location(self, path: tuple[str | int, ...]) -> str:
        """Return the origin of the value at ``path``, or of the innermost block around it; empty if unknown."""
        for end in range(len(path), 0, -1):
            if origin := self.origins.get(dotted(path[:end])):
                return origin
        return self.origins.get("", "")

    def origin_of(self, key: str) -> str | None:
        """Return the origin of the value of ``a.0.b``, or of the text, number or null that takes the place of its
        block; None if neither exists."""
        value: Any = self.values
        found: list[str] = []
        for part in key.split("."):
            if isinstance(value, dict):
                if part not in value:
                    return None
                value = value[part]
            elif isinstance(value, list):
                if not part.isdecimal() or int(part) >= len(value):
                    return None
                value = value[int(part)]
            else:
                break
            found.append(part)
        return self.location(tuple(found))


def dotted(path: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in path)


def load_yaml(path: Path, *, shown_as: str | None = None) -> Document:
    """Read a file. Raises NotFoundError, or ConfigError for invalid YAML, another type than a mapping and duplicate
    keys."""
    name = shown_as or str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise NotFoundError(f"no such file: {name}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"not a UTF-8 text file ({error.reason})", location=name) from None
    except PermissionError:
        raise NotFoundError(f"permission denied: {name}") from None
    _refuse_bidirectional(text, name)
    try:
        loader = _YamlLoader(text)
        node = loader.get_single_node()
        document = Document(origins={"": name})
        if node is None:
            return document
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(
                "the top level must be a mapping", location=f"{name}:{node.start_mark.line + 1}"
            )
        _note_origins(node, (), name, document.origins)
        document.values = loader.construct_document(node)
        refuse_odd_text(document)
        return document
    except yaml.MarkedYAMLError as error:
        line = (error.problem_mark.line + 1) if error.problem_mark else 1
        raise ConfigError(f"YAML error: {error.problem}", location=f"{name}:{line}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"YAML error: control character #x{error.character:02x}", location=f"{name}:{line}"
        ) from None
    except RecursionError:
        raise ConfigError(
            "YAML error: nested too deeply, or an alias that refers to itself", location=name
        ) from None


def refuse_odd_text(document: Document) -> None:
    """Raise ConfigError for the first key or value with an unexpected character; see `odd_text`."""
    for path, text in _texts(document.values, ()):
        if (found := odd_character(text)) is not None:
            raise ConfigError(
                f"{shown(dotted(path))} contains {found}: '{shown(text)[:80]}'",
                location=document.location(path),
                hint="remove the character; store other text in a file",
            )


def refuse_secrets(document: Document) -> None:
    """Raise ConfigError for the first text with the form of a secret, or under a key whose name indicates one.

    Environment variables have a stricter check (`block.Variables`).
    """
    for path, text in _texts(document.values, ()):
        name = next((part for part in reversed(path) if isinstance(part, str)), "")
        if has_secret_form(text) or (text != name and is_named_secret(name, text)):
            raise ConfigError(
                f"the value of {dotted(path)} looks like a secret and would be copied into plans and reports",
                location=document.location(path),
                hint="pass the secret in an environment variable: env: {NAME: {from: NAME}}",
            )


def _texts(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield all keys and texts with their paths, in document order."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, str(key)), str(key)
            yield from _texts(inner, (*path, str(key)))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts(inner, (*path, index))


def _refuse_bidirectional(text: str, name: str) -> None:
    """Check comments as well: an editor would display another file than the one that is parsed."""
    if text.isascii():
        return
    for number, line in enumerate(text.split("\n"), start=1):
        for char in line:
            if char in BIDIRECTIONAL:
                raise ConfigError(
                    f"the file contains {describe(char)}", location=f"{name}:{number}", hint="remove it"
                )


def parse_value(text: str) -> Any:
    """Parse a value as YAML: ``1e-5`` is a number, ``true`` a boolean, ``[a, b]`` a list; invalid YAML is returned as
    text."""
    try:
        return _YamlLoader(text).get_single_data()
    except (yaml.YAMLError, RecursionError):
        return text


def from_override(path: str, text: str, origin: str, *, is_text: bool = False) -> Document:
    """Return a document with one value: ``optimizer.lr``, ``1e-5`` → ``{optimizer: {lr: 1e-5}}``.

    List items are addressed by index: ``environments.eval.0.interval``. ``is_text``: the key accepts only text, so that
    account ``0123`` needs no quotes; ``null`` remains null.
    """
    parts = path.split(".")
    value: Any = parse_value(text)
    if is_text and value is not None and not _is_inherited(value):
        value = text
    if isinstance(value, str) and not text.isprintable():
        value = text  # YAML turns line breaks into spaces; the check of the document refuses them in `text`
    origins = {".".join(parts[:end]): origin for end in range(1, len(parts) + 1)}
    origins |= {dotted((path, *inner)): origin for inner in _paths_in(value)}
    *blocks, key = parts
    values: dict[str, Any] = {key: value}
    for block in reversed(blocks):
        values = {block: values}
    return Document(values, origins)


def _is_inherited(value: Any) -> bool:
    """True for ``{from: HF_TOKEN}``, which is allowed for a variable in addition to text."""
    return isinstance(value, dict) and list(value) == ["from"]


def _paths_in(value: Any) -> Iterator[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (key,)
        yield from ((key, *inner) for inner in _paths_in(item))


def with_dots(key: str) -> str:
    """Convert ``a[0].b`` to ``a.0.b``."""
    return re.sub(r"\[(\d+)\]", r".\1", key.strip())


def dump_yaml(values: dict[str, Any]) -> str:
    return yaml.dump(
        values, Dumper=_YamlDumper, sort_keys=False, allow_unicode=True, default_flow_style=False
    )


def dump_flow(value: Any) -> str:
    """Return a value in one line, such as ``{path: rows.jsonl, num_rows: 8}``."""
    text = yaml.dump(
        value, Dumper=_YamlDumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=10**6
    )
    return text.removesuffix("\n").removesuffix("\n...")


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
        for stale in [path for path in origins if path.startswith(dotted(here) + ".")]:
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
    """Raise ConfigError for an index beyond the list."""
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
                raise ConfigError(f"key '{dotted(here)}' is given twice", location=origin)
            origins[dotted(here)] = origin
            _note_origins(value, here, name, origins)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            origins[dotted((*path, index))] = f"{name}:{value.start_mark.line + 1}"
            _note_origins(value, (*path, index), name, origins)
