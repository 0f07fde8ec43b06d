"""Base class and field types of YAML blocks: frozen, unknown keys rejected, no implicit type conversion."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from primerl_hpc.common.safety.secret_values import is_secret


class Block(BaseModel):
    """One YAML block. The docstring under a field documents it; `explain` and `schema` print it."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
    removed: ClassVar[dict[str, str]] = {}
    """Keys of earlier versions → what to write instead."""


Inherited = dict[Literal["from"], Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]]
"""``{from: HF_TOKEN}``: a process takes the value from the environment of the submitter, so that it is written to no
file."""


def _check_variables(value: VariableMap) -> VariableMap:
    for name, text in value.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} is not a valid name of an environment variable")
        if name.startswith("PRIMERL_"):
            raise ValueError(f"{name} is reserved: the run sets it")
        if isinstance(text, dict):
            continue
        if "\0" in text:
            raise ValueError(f"the value of {name} contains a NUL character")
        if is_secret(name, text):
            raise ValueError(
                f"the value of {name} looks like a secret and would be copied into plans and reports; "
                f"export the variable where you submit and write {name}: {{from: {name}}}"
            )
    return value


Int = Annotated[int, Field(strict=True)]
PositiveInt = Annotated[int, Field(strict=True, ge=1)]
NonNegativeInt = Annotated[int, Field(strict=True, ge=0)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]
PositiveFraction = Annotated[float, Field(strict=True, gt=0, le=1)]
FractionBelowOne = Annotated[float, Field(strict=True, ge=0, lt=1)]
Bool = Annotated[bool, Field(strict=True)]
Auto = Literal["auto"]
VariableMap = dict[str, str | Inherited]
Variables = Annotated[VariableMap, AfterValidator(_check_variables)]
"""Environment variables of processes, except PRIMERL_* ones."""
Scalar = str | Bool | Int | Float | None


def default_type(name: str) -> BeforeValidator:
    """Return a validator for unions that are discriminated by ``type``: blocks without a type get the type ``name``."""

    def add(value: Any) -> Any:
        return {"type": name, **value} if isinstance(value, dict) else value

    return BeforeValidator(add)
