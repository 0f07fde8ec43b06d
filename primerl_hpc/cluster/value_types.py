"""Types of the cluster profile with their checks: one line, word, time, amount of memory, mount; `Short` blocks."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Discriminator, Tag

from primerl_hpc.common.block import Block
from primerl_hpc.common.node.binding import parse_cpus
from primerl_hpc.common.safety.secret_values import mask

_TIME = re.compile(r"(\d+-\d+(:\d{2}){0,2}|\d+(:\d{2}){0,2}|UNLIMITED|INFINITE)")


def _bare_number(value: object) -> object:
    """Convert a number without a unit to text: minutes or MiB, as in SLURM."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _check_time(value: str) -> str:
    if not _TIME.fullmatch(value):
        raise ValueError("must be a SLURM time such as 30 (minutes), 04:00:00 or 2-12:00:00")
    return value


def _check_memory(value: str) -> str:
    if not re.fullmatch(r"\d+[KMGT]?B?", value):
        raise ValueError("must be an amount of memory such as 480G or 0")
    return value


def _check_one_line(value: str) -> str:
    if any(ord(char) < 32 or ord(char) == 127 for char in value):
        raise ValueError("must be one line without control characters")
    if mask(value) != value:
        raise ValueError(
            "looks like it contains a secret, which would be copied into scripts and reports; read it from a variable "
            "or file"
        )
    return value


def _check_given(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty; use null for no value")
    return value


def _check_word(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", value):
        raise ValueError("must be one word of letters, digits, '_', '.', '+' and '-'")
    return value


def _check_no_option(value: str) -> str:
    if value.startswith("-"):
        raise ValueError("must not start with '-', because it would be parsed as an option")
    return value


def _check_no_comma(value: str) -> str:
    if "," in value:
        raise ValueError(
            "must not contain a comma, which separates mounts; write one list item for each mount"
        )
    return value


def _check_suffix(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.@+-]+", value):
        raise ValueError("must be letters, digits, '_', '.', '@', '+' and '-'")
    return value


def _check_pattern(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_*?][A-Za-z0-9_*?]*", value):
        raise ValueError("must be the name of a variable, or a pattern such as CONDA_*")
    return value


def _check_cpus(value: str) -> str:
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", value):
        raise ValueError("must be a list of CPUs such as 0-17,72-89")
    parse_cpus(value)
    return value


def _form(value: object) -> str:
    """Return the tag of the form of `Short` that was given."""
    return "a block" if isinstance(value, dict | Block) else "a text"


SlurmTime = Annotated[str, BeforeValidator(_bare_number), AfterValidator(_check_time)]
OneLine = Annotated[str, AfterValidator(_check_one_line), AfterValidator(_check_given)]
Word = Annotated[str, AfterValidator(_check_word)]
Memory = Annotated[str, BeforeValidator(_bare_number), AfterValidator(_check_memory)]
Program = Annotated[OneLine, AfterValidator(_check_no_option)]
Mount = Annotated[Program, AfterValidator(_check_no_comma)]
CpuList = Annotated[OneLine, AfterValidator(_check_cpus)]
B = TypeVar("B", bound=Block)
Short = Annotated[
    Annotated[OneLine, Tag("a text")] | Annotated[B, Tag("a block")],
    Discriminator(_form),
]
"""A block, or its main field alone as text."""
Suffix = Annotated[OneLine, AfterValidator(_check_suffix)]
Pattern = Annotated[str, AfterValidator(_check_pattern)]
MailType = Literal[
    "NONE",
    "BEGIN",
    "END",
    "FAIL",
    "REQUEUE",
    "ALL",
    "INVALID_DEPEND",
    "STAGE_OUT",
    "TIME_LIMIT",
    "TIME_LIMIT_90",
    "TIME_LIMIT_80",
    "TIME_LIMIT_50",
]
