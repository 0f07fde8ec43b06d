"""Refuse, before the queue, a run whose nodes could not load its models, data or images.

    check_needs(needs, plan, profile, command)      # ["cannot ask https://… whether it has model a/b (ConnectTimeout)"]

``owner/name`` may also be a relative folder that does not exist: the messages cover both meanings.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from primerl_hpc.cluster.load import LoadedProfile
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.offline.prefetch.images import look_for_image
from primerl_hpc.offline.prefetch.inventory import Found, Presence, look
from primerl_hpc.offline.prefetch.needs import Need, NeedKind
from primerl_hpc.offline.prefetch.packages import look_for_package
from primerl_hpc.plan.plan import Plan
from primerl_hpc.recipe.load import LoadedRecipe
from primerl_hpc.transport.base_models.hub_cache import ask_hub, cache_folder, open_cache, value_of

_MODELS = (NeedKind.MODEL, NeedKind.TOKENIZER)


def prefetch_command(loaded: LoadedRecipe, profile: LoadedProfile) -> str:
    """Return the command that fetches what a run needs, for hints."""
    is_found_by_name = profile.path.stem == profile.profile.name and not Path(profile.path.name).is_file()
    name = profile.profile.name if is_found_by_name else str(profile.path)
    return f"primerl-hpc prefetch {shlex.quote(str(loaded.path))} -p {shlex.quote(name)}"


def check_needs(needs: Sequence[Need], plan: Plan, profile: Profile, command: str) -> list[str]:
    """Return warnings about what may be missing. ``command`` fetches it.

    Raises NotFoundError for what the run cannot load: it is in no cache and the nodes are offline, or the hub does not
    have it. If setup lines or a container may set another cache or a token, that is only a warning.
    """
    warnings = []
    caches = {cache_folder(need.variables) for need in needs if need.kind in _MODELS}
    warnings += [warning for folder in caches if (warning := open_cache(folder))]
    for need in needs:
        if need.kind == NeedKind.PACKAGE:  # see `check_packages`
            continue
        for fault, is_sure in _faults(need, plan, profile):
            hint = _hint(need, command)
            if is_sure:
                raise NotFoundError(fault, hint=hint)
            warnings.append(f"{fault}; {hint}" if fault else "")
    return [warning for warning in dict.fromkeys(warnings) if warning]


def check_packages(needs: Sequence[Need], command: str) -> list[str]:
    """Return warnings about packages of environments that cannot be checked from here. ``command`` installs them.

    Raises NotFoundError for one that an interpreter does not have in the version that the recipe names.
    """
    warnings = []
    for need in packages_of(needs):
        found = look_for_package(need)
        text = f"package {need.name} of an environment is not installed: {found.detail}"
        if found.state == Presence.MISSING:
            raise NotFoundError(text, hint=f"install it: {command}")
        if found.state == Presence.UNKNOWN:
            warnings.append(f"whether package {need.name} is installed is unknown: {found.detail}")
    return list(dict.fromkeys(warnings))


def packages_of(needs: Sequence[Need]) -> list[Need]:
    """Return the packages of environments, each once for each interpreter."""
    return [need for need in needs if need.kind == NeedKind.PACKAGE]


def _hint(need: Need, command: str) -> str:
    if need.kind in _MODELS:
        return f"fetch it first: {command}; or set its folder"
    return f"fetch it first: {command}"


def _faults(need: Need, plan: Plan, profile: Profile) -> Iterator[tuple[str, bool]]:
    """Yield (what is wrong, True if the run would fail for sure)."""
    is_fixed = profile.cache_path is not None
    if need.container is not None:
        found = look_for_image(need.container, profile.cache_path)
        if is_fixed and found.state == Presence.MISSING:
            yield f"the image {need.name} is not in the cache: {found.detail}", _is_address(need.name)
        return
    software = (profile.software.default, *profile.software.roles.values())
    may_differ = not is_fixed and (
        bool(profile.software.setup) or any(item.container.image for item in software)
    )
    found = look(need)
    if found.is_complete:
        return
    if need.kind in _MODELS:
        yield from _model_faults(need, found, plan, profile, may_differ=may_differ)
    elif need.is_offline and found.state == Presence.UNKNOWN:
        if is_fixed:
            yield (
                f"the nodes are offline, and whether the cache has the data of {need.name} is unknown",
                False,
            )
    elif need.is_offline:
        yield (
            f"the nodes of profile '{profile.name}' are offline, and {need.kind} {need.name} is not in the cache: "
            f"{found.detail}",
            not may_differ,
        )


def _is_address(image: str) -> bool:
    return not image.startswith(("/", "./", "~"))


def _model_faults(
    need: Need, found: Found, plan: Plan, profile: Profile, *, may_differ: bool
) -> Iterator[tuple[str, bool]]:
    name, folder = need.name, cache_folder(need.variables)
    is_named = any(value_of(need.variables, key) for key in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"))
    if need.is_offline:
        lack = f"is in no cache here ({folder})"
        if found.state == Presence.PARTIAL:
            lack = f"is incomplete in the cache: {found.detail}"
        fault = f"the nodes of profile '{profile.name}' are offline, and {name} {lack}"
        is_sure = (
            plan.scheduler == "local" or folder.is_dir() or not is_named or profile.cache_path is not None
        )
    else:
        fault = ask_hub(name, need.variables) or ""
        is_sure = "HTTP" in fault
    if not fault:
        return
    if is_sure and not may_differ:
        yield f"{fault}, and the folder {Path.cwd() / name} does not exist", True
    elif not (may_differ and profile.offline):
        yield fault, False
