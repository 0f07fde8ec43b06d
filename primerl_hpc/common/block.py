"""The base of every YAML block: frozen, unknown keys refused, no silent coercion of types."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Block(BaseModel):
    """One YAML block. A field's meaning is the docstring under it; `explain` and `schema` print it."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def _check_variables(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} cannot be the name of an environment variable")
        if name.startswith("PRIMERL_"):
            raise ValueError(f"{name} is set by the run itself")
        if "\0" in text:
            raise ValueError(f"the value of {name} has a NUL character")
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
Variables = Annotated[dict[str, str], AfterValidator(_check_variables)]
"""Environment variables of processes; ours are not among them."""
Scalar = str | Bool | Int | Float | None


def default_type(name: str) -> BeforeValidator:
    """For unions told apart by ``type``: a block that does not say its type is a ``name``."""

    def add(value: Any) -> Any:
        return {"type": name, **value} if isinstance(value, dict) else value

    return BeforeValidator(add)
