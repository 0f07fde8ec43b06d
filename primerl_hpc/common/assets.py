"""Find recipes, profiles and templates: first the user's, then a checkout's, then the installed ones.

``find_asset("cluster_profiles", "local")`` searches ``<state home>/cluster_profiles``, the checkout that contains this
package, and ``share/primerl-hpc`` of the installation, in this order. Explicit paths are handled by the caller.
"""

from __future__ import annotations

import difflib
import os
from functools import cache
from pathlib import Path

from primerl_hpc.common import env
from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.common.safety.odd_text import check_path_text

KINDS = ("recipes", "cluster_profiles", "templates")


def asset_roots() -> tuple[Path, ...]:
    """Return the folders with ``recipes/``, ``cluster_profiles/`` and ``templates/``, highest priority first."""
    home = env.state_home()
    check_path_text(home, env.HOME)
    return (home, *shipped_roots()) if home.is_dir() else shipped_roots()


@cache
def shipped_roots() -> tuple[Path, ...]:
    """Return the roots of the checkout and of the installation.

    An installation stores them in ``share/primerl-hpc`` of its prefix, a few levels above the package. This holds for
    virtual environments, ``--user``, ``--prefix`` and ``--target``.
    """
    package = Path(__file__).resolve().parents[1]
    installed = [folder / "share" / "primerl-hpc" for folder in list(package.parents)[:4]]
    trusted = [root for root in installed if _is_trusted(root)]
    return tuple(root for root in (package.parent, *trusted) if root.is_dir())


def _is_trusted(folder: Path) -> bool:
    """True if the user or root owns ``folder``: profiles run commands, and folders above a checkout may be shared."""
    try:
        return folder.stat().st_uid in (os.geteuid(), 0)
    except OSError:
        return False


def find_asset(kind: str, name: str) -> Path:
    """Return the file ``<root>/<kind>/<name>`` or ``<name>.yaml`` from the first root that contains it.

    Raises NotFoundError with the name of that kind that is most similar, or with all known names.
    """
    for root in asset_roots():
        for path in (root / kind / name, root / kind / f"{name}.yaml"):
            if path.is_file():
                return path
    known = [asset.removesuffix(".yaml") for asset in list_assets(kind)]
    near = difflib.get_close_matches(name.removesuffix(".yaml"), known, n=1, cutoff=0.8)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known) or 'none'}"
    hint = "it is a folder; give the path of a YAML file" if Path(name).is_dir() else hint
    raise NotFoundError(f"no '{name}' among the {kind.replace('_', ' ')}", hint=hint)


def list_assets(kind: str, pattern: str = "*.yaml") -> list[str]:
    """Return the relative paths of all assets of a kind in all roots, sorted."""
    names = {
        str(path.relative_to(root / kind)) for root in asset_roots() for path in (root / kind).rglob(pattern)
    }
    return sorted(names)


def template_dirs() -> list[Path]:
    """Return the folders of sbatch templates, highest priority first: PRIMERL_TEMPLATES, the state home's, the shipped
    ones."""
    if (folder := env.templates()) is not None:
        check_path_text(folder, env.TEMPLATES)
    own = [folder, env.state_home() / "templates" / "sbatch"]
    return [*(path for path in own if path is not None and path.is_dir()), *shipped_template_dirs()]


def shipped_template_dirs() -> list[Path]:
    return [path for root in shipped_roots() if (path := root / "templates" / "sbatch").is_dir()]
