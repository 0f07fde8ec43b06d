"""Packages of environments (``environments.*.package``) in the interpreters that load them.

Both looking and installing run `primerl_hpc.envs.hub` in the interpreter, so that they see what a run would import.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.launch.hub_cache import cache_folder, datasets_folder
from primerl_hpc.launch.prefetch.inventory import Found, Presence
from primerl_hpc.launch.prefetch.needs import Need, NeedKind
from primerl_hpc.launch.prepare import package_root

OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
TIMEOUT_S = 1800.0
RECORDED = ("package", "version", "url", "sha256")


def child_environment(need: Need, *, is_offline: bool) -> dict[str, str]:
    """Return the environment of a process that fills the caches of a need's role.

    The offline mode of the submitting shell does not apply: this command exists to use the network.
    """
    environ = {name: value for name, value in os.environ.items() if name not in OFFLINE_VARIABLES}
    paths = (package_root(), need.variables.get(env.PYTHONPATH), os.environ.get(env.PYTHONPATH))
    environ |= need.variables
    environ |= {
        "HF_HUB_CACHE": str(cache_folder(need.variables)),
        "HF_DATASETS_CACHE": str(datasets_folder(need.variables)),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        env.PYTHONPATH: env.join_pythonpath(*paths),
        "PYTHONSAFEPATH": "1",
    }
    return {**environ, **(dict.fromkeys(OFFLINE_VARIABLES, "1") if is_offline else {})}


def ask_python(
    python: str, packages: Sequence[str], environ: dict[str, str], *, install: bool
) -> list[dict[str, Any]]:
    """Return the answer of `primerl_hpc.envs.hub` in ``python``, with a ``fault`` for each package if it cannot run."""
    try:
        done = subprocess.run(
            [python, "-m", "primerl_hpc.envs.hub"],
            input=json.dumps({"packages": list(packages), "install": install}),
            env=environ,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        found, last = None, str(error)
    if found is None:
        fault = f"{python} cannot look for its packages: {last}"
        return [{"package": name, "state": "unknown", "fault": fault, "hint": ""} for name in packages]
    for item in found:
        if "fault" in item and "pip" in item["fault"] and done.stderr:
            item["hint"] = f"{_error_of_pip(done.stderr)}{item['hint']}"
    return found


def _error_of_pip(output: str) -> str:
    """Return pip's last line that starts with ERROR, for a hint."""
    errors = [line for line in output.splitlines() if line.startswith("ERROR")]
    return f"{errors[-1].removeprefix('ERROR: ')}; " if errors else ""


def install_packages(python: str, packages: Sequence[str]) -> list[dict[str, Any]]:
    """Install packages into an interpreter; return the answers of `ask_python`."""
    environ = {
        **os.environ,
        env.PYTHONPATH: env.join_pythonpath(package_root(), os.environ.get(env.PYTHONPATH)),
        "PYTHONSAFEPATH": "1",
    }
    return ask_python(python, packages, environ, install=True)


def look_for_package(need: Need) -> Found:
    """Return the state of the package of an environment in the interpreter that loads it."""
    if need.python is None:
        return Found(Presence.UNKNOWN, "it is loaded inside a container")
    (answer,) = ask_python(need.python, [need.name], child_environment(need, is_offline=True), install=False)
    if answer["state"] == "unknown":
        return Found(Presence.UNKNOWN, answer["fault"])
    state = Presence.COMPLETE if answer["state"] == "present" else Presence.MISSING
    return Found(state, answer["detail"])


def package_records(needs: Iterable[Need]) -> list[dict[str, Any]]:
    """Return version, URL and SHA-256 of each package that the interpreters have, for provenance.json."""
    records: list[dict[str, Any]] = []
    for need in needs:
        if need.kind == NeedKind.PACKAGE and need.python is not None:
            environ = child_environment(need, is_offline=True)
            (found,) = ask_python(need.python, [need.name], environ, install=False)
            record = {"python": need.python, **{key: found.get(key) for key in RECORDED}}
            records += [record] if record not in records else []
    return records
