"""Reads a cluster profile: a path, or the name of a shipped or own one (``local``, ``h100x64``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.assets import find_asset
from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.common.validate import validate
from primerl_hpc.common.yamldoc import Document, load_yaml


@dataclass(frozen=True)
class LoadedProfile:
    profile: Profile
    document: Document
    path: Path


def load_profile(name: str) -> LoadedProfile:
    """Raises NotFoundError naming the known profiles, ConfigError with file, line and key."""
    path = Path(name)
    if not path.is_file():
        try:
            path = find_asset("cluster_profiles", name if path.suffix else f"{name}.yaml")
        except NotFoundError as error:
            raise NotFoundError(f"no cluster profile '{name}'", mend=error.mend) from None
    document = load_yaml(path)
    return LoadedProfile(validate(Profile, document), document, path)
