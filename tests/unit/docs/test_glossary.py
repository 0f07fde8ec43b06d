"""docs/glossary.md defines the nouns of the design and every member of the enums in common/names.py."""

from __future__ import annotations

import inspect
import re
from enum import StrEnum

import pytest

from primerl_hpc.common import names
from tests.support.helpers import ROOT

PAGE = (ROOT / "docs" / "glossary.md").read_text()
NOUNS = (
    *(
        "recipe",
        "cluster profile",
        "plan",
        "run",
        "attempt",
        "incarnation",
        "role",
        "phase",
        "step",
        "policy version",
    ),
    *(
        "task",
        "rollout",
        "group",
        "batch",
        "sample",
        "micro-batch",
        "staleness",
        "mismatch KL",
        "restart request",
    ),
    *("endpoint", "lease"),
)
ENUMS = [
    value
    for value in vars(names).values()
    if inspect.isclass(value) and issubclass(value, StrEnum) and value.__module__ == names.__name__
]


@pytest.mark.parametrize("noun", NOUNS)
def test_the_glossary_defines_a_noun_of_the_design(noun: str) -> None:
    entry = re.search(rf"^- \*\*{noun}\*\*[^:]*: (.+(?:\n  .+)*)", PAGE, re.M)
    assert entry and 20 < len(entry[1]) < 500


@pytest.mark.parametrize("enum", ENUMS, ids=lambda enum: enum.__name__)
def test_the_glossary_defines_every_member_of_an_enum(enum: type[StrEnum]) -> None:
    table = re.search(rf"^\| `{enum.__name__}` \|.*\n\|[-| ]+\n((?:\|.*\n)+)", PAGE, re.M)
    assert table, f"no table of {enum.__name__}"
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", table[1], re.M)
    assert [name for name, _ in rows] == [member.value for member in enum]
    assert all(len(text.split()) >= 3 for _, text in rows)


def test_an_entry_is_defined_once() -> None:
    entries = re.findall(r"^- \*\*(.+?)\*\*", PAGE, re.M)
    assert entries and len(entries) == len(set(entries))
