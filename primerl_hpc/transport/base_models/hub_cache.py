"""Where the Hugging Face libraries keep models and datasets, and a question to the hub about a name.

cache_folder({"HF_HOME": "/shared/hf"})      # /shared/hf/hub
ask_hub("org/model", {})                     # None, or "https://huggingface.co has no model org/model, …"
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from primerl_hpc.common import env
from primerl_hpc.run.access.ownership import writable_by_others

if TYPE_CHECKING:
    import httpx

HUB = "https://huggingface.co"
TIMEOUT_S = 5.0


def ask_hub(name: str, variables: Mapping[str, str]) -> str | None:
    """Return the hub's error about the name, or why it cannot be reached; None if it has the model."""
    import httpx  # 0.1 s that a plan of an offline profile does not need

    hub = (value_of(variables, "HF_ENDPOINT") or HUB).rstrip("/")
    token = value_of(variables, "HF_TOKEN") or stored_token(variables)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(
            f"{hub}/api/models/{name}", headers=headers, timeout=TIMEOUT_S, follow_redirects=True
        )
        if answer.status_code == 200 and _is_gated(answer):
            # the hub describes a gated model to everyone, but gives its files only to accounts with access
            page = f"{hub}/{name}"
            files = httpx.head(f"{page}/resolve/main/config.json", headers=headers, timeout=TIMEOUT_S)
            if files.status_code in (401, 403):
                return (
                    f"{name} is a gated model and this account has no access (HTTP {files.status_code}): request it on "
                    f"{page}, then set HF_TOKEN"
                )
    except httpx.HTTPError as error:
        return f"cannot ask {hub} whether it has model {name} ({type(error).__name__})"
    if answer.status_code in (401, 403, 404):
        return f"{hub} has no model {name}, or it is private (HTTP {answer.status_code})"
    return None


def _is_gated(answer: httpx.Response) -> bool:
    try:
        described = answer.json()
    except ValueError:
        return False
    return isinstance(described, dict) and bool(described.get("gated"))


def stored_token(variables: Mapping[str, str]) -> str | None:
    """Return the token that ``hf auth login`` has stored; None without one."""
    path = value_of(variables, "HF_TOKEN_PATH") or str(_home(variables) / "token")
    try:
        return Path(path).expanduser().read_text().strip() or None
    except OSError:
        return None


def cache_folder(variables: Mapping[str, str]) -> Path:
    """Return the cache folder of ``huggingface_hub`` in a process with ``variables`` added to this environment."""
    return Path(value_of(variables, "HF_HUB_CACHE") or _home(variables) / "hub").expanduser()


def open_cache(folder: Path) -> str | None:
    """Return a warning if other users can replace what is in this cache; None if they cannot, or without a cache.

    Weights are checked when they are fetched, but not when they are loaded, and a model may contain code.
    """
    for path in (folder, *folder.glob("models--*")):
        if path.exists() and (found := writable_by_others(path.resolve())) is not None:
            return (
                f"other users may write to {found}, so they can replace models that your runs load; "
                f"chmod -R go-w it, or use a cache of your own"
            )
    return None


def datasets_folder(variables: Mapping[str, str]) -> Path:
    """Return the cache folder of package ``datasets``, as `cache_folder`."""
    return Path(value_of(variables, "HF_DATASETS_CACHE") or _home(variables) / "datasets").expanduser()


def _home(variables: Mapping[str, str]) -> Path:
    home = (
        value_of(variables, "HF_HOME") or f"{value_of(variables, 'XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    )
    return Path(home).expanduser()


def value_of(variables: Mapping[str, str], name: str) -> str | None:
    """Return a variable of a process to which ``variables`` are added."""
    return variables.get(name) or env.variable(name)


def is_true(value: str | None) -> bool:
    return (value or "").upper() in ("1", "ON", "YES", "TRUE")
