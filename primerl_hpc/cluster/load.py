"""Reads a cluster profile: a path, or the name of a shipped or own one (``local``, ``h100x64``).

loaded = load_profile("h100x64", overrides=["scheduler.time=02:00:00"])
loaded.profile.scheduler.time, loaded.document.origins["scheduler.time"]      # '02:00:00', '--profile-set'

Over the file lie the environment (``PRIMERL_PROFILE__SCHEDULER__TIME``) and ``--profile-set``; later ones win.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common import env
from primerl_hpc.common.assets import find_asset
from primerl_hpc.common.errors import ConfigError, NotFoundError
from primerl_hpc.common.validate import from_variable, is_text, validate
from primerl_hpc.common.yamldoc import Document, dump_yaml, from_override, load_yaml, with_dots


@dataclass(frozen=True)
class LoadedProfile:
    profile: Profile
    document: Document
    path: Path
    is_changed: bool = False
    """By overrides, so that the file alone does not tell it."""

    @property
    def text(self) -> str:
        """YAML of the profile as it is used: the file itself with its comments, or what was made of it."""
        is_whole = not self.is_changed and self.profile.templates is None
        return self.path.read_text() if is_whole else dump_yaml(self.document.values)


def load_profile(
    name: str, *, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> LoadedProfile:
    """Raises NotFoundError naming the known profiles, ConfigError with file, line and key."""
    path = Path(name)
    if not path.is_file():
        try:
            path = find_asset("cluster_profiles", name)
        except NotFoundError as error:
            raise NotFoundError(f"no cluster profile '{name}'", mend=error.mend) from None
    document = load_yaml(path)
    changes = [_split(text) for text in overrides]
    variables = env.profile_overrides(environ)
    above = [(from_variable(Profile, key), value, name) for name, key, value in variables]
    for key, value, origin in [*above, *((key, value, "--profile-set") for key, value in changes)]:
        document = document.overlay(from_override(key, value, origin, is_text=is_text(Profile, key)))
    profile = _find_templates(validate(Profile, document), document, path)
    return LoadedProfile(profile, document, path, is_changed=bool(above or changes))


def _find_templates(profile: Profile, document: Document, path: Path) -> Profile:
    """With ``templates`` as an absolute folder, in the document too: the frozen profile lies elsewhere."""
    if profile.templates is None:
        return profile
    folder = (path.parent / Path(profile.templates).expanduser()).resolve()
    if not folder.is_dir():
        raise NotFoundError(f"templates: no folder {folder}", place=document.place(("templates",)))
    document.values["templates"] = str(folder)
    return profile.model_copy(update={"templates": str(folder)})


def change_profile(loaded: LoadedProfile, changes: dict[str, Any], origin: str) -> LoadedProfile:
    """The profile with ``changes`` (a mapping shaped like it) laid over. Raises ConfigError for an unknown key."""
    if not changes:
        return loaded
    document = loaded.document.overlay(Document(changes, {key: origin for key in changes}))
    return LoadedProfile(validate(Profile, document), document, loaded.path, is_changed=True)


def _split(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ConfigError(
            f"--profile-set {text!r} is not of the form key=value", mend="write e.g. scheduler.time=02:00:00"
        )
    return with_dots(key), value
