"""Packages of environments (``environments.*.package``) in the interpreters that load them.

Both looking and installing call `primerl_hpc.envs.hub` in the interpreter, so that they see what a run would import.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.errors import PrimerlError
from primerl_hpc.common.findings import Finding
from primerl_hpc.common.interpreters import InterpreterError, ask
from primerl_hpc.launch.hub_cache import cache_folder, datasets_folder
from primerl_hpc.launch.prefetch.inventory import Found, Presence
from primerl_hpc.launch.prefetch.needs import OFFLINE_VARIABLES, Need, NeedKind, needs_of
from primerl_hpc.recipe.load import load_recipe

TIMEOUT_S = 1800.0
RECORDED = ("package", "version", "url", "sha256")


def child_variables(need: Need, *, is_offline: bool) -> dict[str, str]:
    """Return the variables of a process that fills the caches of a need's role.

    The offline mode of the submitting shell does not apply: this command exists to use the network.
    """
    return {
        **dict.fromkeys(OFFLINE_VARIABLES, "0"),
        **need.variables,
        "HF_HUB_CACHE": str(cache_folder(need.variables)),
        "HF_DATASETS_CACHE": str(datasets_folder(need.variables)),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **(dict.fromkeys(OFFLINE_VARIABLES, "1") if is_offline else {}),
    }


def ask_python(python: str, package: str, variables: Mapping[str, str], *, install: bool) -> dict[str, Any]:
    """Return what ``python`` has of a package (`primerl_hpc.envs.hub`). Raises PrimerlError if installing fails."""
    name = "install_if_missing" if install else "installed_package"
    try:
        return ask(python, variables, f"primerl_hpc.envs.hub:{name}", package, timeout_s=TIMEOUT_S)
    except PrimerlError as error:
        error.hint = f"{_error_of_pip(error.details)}{error.hint}"
        raise


def _error_of_pip(output: str) -> str:
    """Return pip's last line that starts with ERROR, for a hint."""
    errors = [line for line in output.splitlines() if line.startswith("ERROR")]
    return f"{errors[-1].removeprefix('ERROR: ')}; " if errors else ""


def look_for_package(need: Need) -> Found:
    """Return the state of the package of an environment in the interpreter that loads it."""
    if need.python is None:
        return Found(Presence.UNKNOWN, "it is loaded inside a container")
    try:
        found = ask_python(need.python, need.name, child_variables(need, is_offline=True), install=False)
    except InterpreterError as error:
        return Found(Presence.UNKNOWN, error.cause)
    state = Presence.COMPLETE if found["state"] == "present" else Presence.MISSING
    return Found(state, found["detail"])


def package_records(needs: Iterable[Need]) -> list[dict[str, Any]]:
    """Return version, URL and SHA-256 of each package that the interpreters have, for provenance.json."""
    records: list[dict[str, Any]] = []
    for need in needs:
        if need.kind == NeedKind.PACKAGE and need.python is not None:
            try:
                found = ask_python(
                    need.python, need.name, child_variables(need, is_offline=True), install=False
                )
            except InterpreterError:
                found = {"package": need.name}
            record = {"python": need.python, **{key: found.get(key) for key in RECORDED}}
            records += [record] if record not in records else []
    return records


def examine_packages(recipe: str, profile: Profile) -> Iterator[Finding]:
    """Yield a result for the package of each environment of the recipe."""
    for need in needs_of(load_recipe(recipe).recipe, profile):
        if need.kind == NeedKind.PACKAGE:
            found = look_for_package(need)
            is_ok = found.state.value != "missing"
            hint = f"install it: primerl-hpc prefetch {recipe} -p {profile.name}"
            yield Finding.judged("environment package", is_ok, f"{need.name}: {found.detail}", hint)
