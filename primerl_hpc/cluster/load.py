"""Load a cluster profile by path, or by the name of a shipped or user-defined one (``local``, ``h100x64``).

loaded = load_profile("h100x64", overrides=["scheduler.time=02:00:00"])
loaded.profile.scheduler.time, loaded.document.origins["scheduler.time"]      # '02:00:00', '--profile-set'

A variant of the profile (``--variant debug``) overrides the file, and ``--profile-set`` overrides both. Environment
variables (``PRIMERL_PROFILE__SCHEDULER__TIME``) apply to keys that neither file nor variant sets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common import env
from primerl_hpc.common.assets import find_asset
from primerl_hpc.common.document import Document, dump_yaml, from_override, load_yaml, with_dots
from primerl_hpc.common.errors import ConfigError, NotFoundError
from primerl_hpc.common.safety.odd_text import check_path_text
from primerl_hpc.common.validate import is_text, split_variables, validate


@dataclass(frozen=True)
class LoadedProfile:
    profile: Profile
    document: Document
    path: Path
    is_changed: bool = False
    """True if overrides changed the content of the file."""
    warnings: tuple[str, ...] = ()
    """About variables that the file overrides."""

    @property
    def text(self) -> str:
        """Return the YAML of the profile in use: the file with its comments, or the values with overrides."""
        is_unchanged = not self.is_changed and self.profile.templates is None
        return self.path.read_text() if is_unchanged else dump_yaml(self.document.values)


def load_profile(
    name: str,
    *,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    variant: str | None = None,
) -> LoadedProfile:
    """Load and validate a profile, with all of its variants.

    Raises NotFoundError with the known names of profiles or variants, ConfigError with file, line and key.
    """
    check_path_text(name, "profile")
    path = Path(name)
    if not path.is_file():
        try:
            path = find_asset("cluster_profiles", name)
        except NotFoundError as error:
            raise NotFoundError(f"no cluster profile '{name}'", hint=error.hint) from None
    document = load_yaml(path)
    if "kind" in document.values and "scheduler" not in document.values:
        raise ConfigError("this is a recipe, not a cluster profile", location=str(path))
    document = _with_variant(document, variant, name)
    above, warnings = split_variables(Profile, document, env.profile_overrides(environ))
    above += [(*_split(text), "--profile-set") for text in overrides]
    for key, value, origin in above:
        document = document.overlay(from_override(key, value, origin, is_text=is_text(Profile, key)))
    profile = validate(Profile, document)
    is_expanded = profile.cache_path is not None or profile.software.bundle is not None
    if is_expanded:
        profile = _expand_paths(profile, document)
    profile = _find_templates(profile, document, path)
    return LoadedProfile(profile, document, path, bool(above or variant or is_expanded), warnings)


def _expand_paths(profile: Profile, document: Document) -> Profile:
    """Make ``cache.path`` and ``software.bundle`` absolute, also in the document: nodes may have other variables."""
    if profile.cache_path is not None:
        path, given = _absolute("cache", profile.cache_path, document), document.values["cache"]
        document.values["cache"] = {**given, "path": path} if isinstance(given, dict) else path
    if profile.software.bundle is not None:
        path = _absolute("software.bundle", profile.software.bundle, document)
        document.values["software"] = {**document.values["software"], "bundle": path}
    checked = validate(Profile, document)
    return profile.model_copy(update={"cache": checked.cache, "software": checked.software})


def _absolute(key: str, text: str, document: Document) -> str:
    """Return a path with its variables and ``~`` replaced. Raises ConfigError if it is not absolute then."""
    location = document.location(tuple(key.split(".")))
    expanded = os.path.expandvars(text)
    if (unset := re.search(r"\$\{?(\w+)", expanded)) is not None:
        raise ConfigError(
            f"{key}: {text} contains ${unset[1]}, which is not set",
            location=location,
            hint="set it, or write the full path",
        )
    path = Path(expanded).expanduser()
    if not path.is_absolute():
        raise ConfigError(f"{key}: {text} is not an absolute path", location=location)
    check_path_text(path, key)
    return str(path)


def _with_variant(document: Document, name: str | None, profile: str) -> Document:
    """Return the document with a variant merged over it. Every variant is validated, whichever is chosen.

    The result has no variants: a run directory stores what was used.
    """
    variants = document.values.get("variants")
    if not isinstance(variants, dict):
        variants = {}
    plain = Document(
        {key: value for key, value in document.values.items() if key != "variants"}, document.origins
    )
    merged = {}
    for variant, changes in variants.items():
        if isinstance(changes, dict):
            if "variants" in changes or "name" in changes:
                raise ConfigError(
                    f"variants.{variant} cannot contain name or variants",
                    location=document.location(("variants", variant)),
                )
            prefix = f"variants.{variant}."
            origins = {
                key.removeprefix(prefix): origin
                for key, origin in document.origins.items()
                if key.startswith(prefix)
            }
            merged[variant] = plain.overlay(Document(changes, origins))
            _check_variant(merged[variant], variant, document)
    if name is None:
        return document
    if name not in merged:
        known = f"one of {', '.join(merged)}" if merged else "it has none; use --partition, --qos and --time"
        raise NotFoundError(f"profile '{profile}' has no variant '{name}'", hint=known)
    return merged[name]


def _check_variant(merged: Document, name: str, document: Document) -> None:
    try:
        validate(Profile, merged)
    except ConfigError as error:
        location = error.location or document.location(("variants", name))
        raise ConfigError(f"variants.{name}: {error.cause}", location=location, hint=error.hint) from None


def _find_templates(profile: Profile, document: Document, path: Path) -> Profile:
    """Make ``templates`` an absolute path, also in the document: the frozen profile is stored in another folder."""
    if profile.templates is None:
        return profile
    folder = (path.parent / Path(profile.templates).expanduser()).resolve()
    check_path_text(folder, "templates")
    if not folder.is_dir():
        raise NotFoundError(
            f"templates: folder {folder} does not exist", location=document.location(("templates",))
        )
    document.values["templates"] = str(folder)
    return profile.model_copy(update={"templates": str(folder)})


def change_profile(loaded: LoadedProfile, changes: dict[str, Any], origin: str) -> LoadedProfile:
    """Return the profile with ``changes``, a nested mapping, merged over it. Raises ConfigError for an unknown key."""
    if not changes:
        return loaded
    document = loaded.document.overlay(Document(changes, {key: origin for key in changes}))
    return LoadedProfile(validate(Profile, document), document, loaded.path, is_changed=True)


def _split(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ConfigError(
            f"--profile-set {text!r} must have the form key=value", hint="e.g. scheduler.time=02:00:00"
        )
    return with_dots(key), value
