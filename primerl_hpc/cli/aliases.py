"""Commands of earlier versions, and what they are called now. An entry is removed one release after it was added.

replacement("trainer", ["runs/a", "--index", "1"])     # ("role", "trainer")
replacement("submit", ["my.yaml", "--bench"])          # ("bench", "submit")
replacement("submit", ["my.yaml"])                     # (): a present command
"""

from __future__ import annotations

from primerl_hpc.common.names import Kind, Role

ROLES = tuple(role.value.replace("_", "-") for role in Role)
RENAMED: dict[str, tuple[str, ...]] = {
    "list": ("status", "--list"),
    "render": ("plan", "--scripts"),
    "shell": ("exec",),
    "schema": ("explain", "--schema"),
} | {role: ("role", role) for role in ROLES}
"""Earlier command → the words that replace it."""
_BENCH = "--bench"


def replacement(name: str, arguments: list[str]) -> tuple[str, ...]:
    """Return the words that replace ``name``, or () if it is a present command."""
    if _BENCH in arguments and name in (*ROLES, "submit"):
        return "bench", name
    if name == "inference" and any(map(_is_of_engines, arguments)):
        return ("submit",)
    return RENAMED.get(name, ())


def note(name: str, present: tuple[str, ...]) -> str:
    """Return the line that names the present command."""
    old, new = name, " ".join(present)
    if present[0] == "bench":
        old, new = f"{name} {_BENCH}", new.replace("bench submit", "bench loop")
    return f"note: 'primerl-hpc {old}' is now 'primerl-hpc {new}'; the earlier name will be removed"


def present_arguments(name: str, arguments: list[str]) -> list[str]:
    """Return the arguments of an earlier command in the form that its `replacement` accepts."""
    if name == "schema":
        kinds = ("recipe", "profile")
        return [part for word in arguments for part in (("--of", word) if word in kinds else (word,))]
    return [word for word in arguments if word != _BENCH]


def _is_of_engines(word: str) -> bool:
    """True for a recipe of kind inference. Raises ConfigError for a recipe of another kind."""
    from pathlib import Path

    from primerl_hpc.common.errors import ConfigError, PrimerlError
    from primerl_hpc.launch.evaluate import find_source
    from primerl_hpc.recipe.load import load_recipe

    try:
        if word.startswith("-") or not isinstance(find_source(word), Path):
            return False
        kind = load_recipe(word).recipe.kind
    except PrimerlError:
        return Path(word).is_file()  # submit reports the error
    if kind != Kind.INFERENCE:
        raise ConfigError(
            f"a recipe of kind {kind} has more processes than engines",
            location=word,
            hint="run it with primerl-hpc submit, or use a recipe of kind inference",
        )
    return True
