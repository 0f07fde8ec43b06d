"""Files of a folder with SFT rows, and the split that their names state.

    data_files(Path("rows"), "train")     # [rows/train-0.jsonl, rows/train-1.jsonl]

The rules for splits are those of package ``datasets`` (https://huggingface.co/docs/datasets/repository_structure),
which login nodes may lack: first ``data/SPLIT-00000-of-00001.parquet``, then names of folders, then names of files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePath

from primerl_hpc.common.errors import DataError
from primerl_hpc.recipe.hub import SUFFIXES

KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in names that state a split; `datasets` has the same ones."""
_SEPARATOR = r"[-._ 0-9]"
_WORDS = {
    split: re.compile(rf"(?:^|{_SEPARATOR})(?:{'|'.join(words)})(?:{_SEPARATOR}|$)")
    for split, words in KEYWORDS.items()
}
_SHARD = re.compile(r"data/([^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_SHOWN_FILES = 6


def data_files(folder: Path, split: str | None = None) -> list[Path]:
    """Return the .jsonl and .parquet files of a folder that belong to ``split``, sorted by path; [] if it has none.

    Files below a name that begins with ``.`` or ``_`` are not data. The files in a folder ``x.parquet`` are the parts
    of one table, whose name states the split. Without ``split``, all files must belong to the same one.

    Raises DataError with their names if files of several splits are found, or none of ``split``.
    """
    tables = _tables(folder)
    if folder.suffix in SUFFIXES:  # the folder is a table
        return [file for files in tables.values() for file in files]
    groups = group_by_split(tables)
    if split is None:
        if len(groups) > 1:
            raise DataError(
                f"the folder has files of several splits: {_listing(groups)}",
                location=str(folder),
                hint="set split of this source, or list the files as sources of their own",
            )
        chosen = next(iter(groups.values()), [])
    elif groups and split not in groups and not (split == "train" and list(groups) == [""]):
        raise DataError(
            f"the folder has no files of split '{split}': {_listing(groups)}",
            location=str(folder),
            hint="correct split of this source, or list the files as sources of their own",
        )
    else:
        chosen = groups.get(split) or groups.get("", [])
    return [file for name in chosen for file in tables[name]]


def group_by_split(names: Iterable[PurePath]) -> dict[str, list[PurePath]]:
    """Return the files of each split, whose names are relative to the folder; key "" if no name states one.

    A name may state several splits.
    """
    files = list(names)
    for splits_of in (_split_of_shard, _splits_of_folders, _splits_of_name):
        stated = {file: splits_of(file) for file in files}
        if any(stated.values()):
            break
    else:
        return {"": files} if files else {}
    groups: dict[str, list[PurePath]] = {}
    for file, splits in stated.items():
        for split in splits or ("",):
            groups.setdefault(split, []).append(file)
    return groups


def _split_of_shard(file: PurePath) -> list[str]:
    shard = _SHARD.fullmatch(file.as_posix())
    return [shard[1]] if shard is not None else []


def _splits_of_folders(file: PurePath) -> list[str]:
    return [split for split, words in _WORDS.items() if any(words.search(name) for name in file.parts[:-1])]


def _splits_of_name(file: PurePath) -> list[str]:
    return [split for split, words in _WORDS.items() if words.search(file.name)]


def _tables(folder: Path) -> dict[PurePath, list[Path]]:
    """Return the files of each table, both sorted. A table is a file, or the outermost folder with its suffix."""
    tables: dict[PurePath, list[Path]] = {}
    for file in sorted(folder.rglob("*")):
        relative = file.relative_to(folder)
        is_hidden = any(name.startswith((".", "_")) for name in relative.parts)
        if is_hidden or file.suffix not in SUFFIXES or not file.is_file():
            continue
        parents = [parent for parent in relative.parents if parent.suffix in SUFFIXES]
        tables.setdefault(parents[-1] if parents else relative, []).append(file)
    return tables


def _listing(groups: dict[str, list[PurePath]]) -> str:
    parts = []
    for split, files in groups.items():
        names = [file.as_posix() for file in files[:_SHOWN_FILES]]
        more = f" and {len(files) - len(names):,} more" if len(files) > len(names) else ""
        parts.append(f"{split or 'no split in the name'} ({', '.join(names)}{more})")
    return ", ".join(parts)
