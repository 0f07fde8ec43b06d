"""Finds recipes, profiles and templates: the user's own first, then a checkout's, then the installed ones.

Order for ``find_asset("cluster_profiles", "local")``: ``<state home>/cluster_profiles``, the checkout this package
lies in, ``share/primerl-hpc`` of the installation. An explicit path is the caller's business.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from primerl_hpc.common import env
from primerl_hpc.common.errors import NotFoundError

KINDS = ("recipes", "cluster_profiles", "templates")


@cache
def asset_roots() -> tuple[Path, ...]:
    """Folders that may hold ``recipes/``, ``cluster_profiles/`` and ``templates/``, best first.

    An installation keeps them in ``share/primerl-hpc`` of its prefix, some levels above the package: virtual
    environments, ``--user``, ``--prefix`` and ``--target`` alike.
    """
    package = Path(__file__).resolve().parents[1]
    installed = [folder / "share" / "primerl-hpc" for folder in list(package.parents)[:4]]
    roots = [env.state_home(), package.parent, *installed]
    return tuple(root for root in roots if root.is_dir())


def find_asset(kind: str, name: str) -> Path:
    """The YAML file ``<root>/<kind>/<name>`` of the best root that has it; a name may lack the suffix, and have dots of its own.

    Raises NotFoundError listing what there is of that kind.
    """
    for root in asset_roots():
        for path in (root / kind / name, root / kind / f"{name}.yaml"):
            if path.is_file():
                return path
    known = ", ".join(each.removesuffix(".yaml") for each in list_assets(kind)) or "none"
    raise NotFoundError(f"no '{name}' among the {kind.replace('_', ' ')}", mend=f"known: {known}")


def list_assets(kind: str, pattern: str = "*.yaml") -> list[str]:
    """Names (relative paths) of all assets of a kind, from every root."""
    names = {
        str(path.relative_to(root / kind)) for root in asset_roots() for path in (root / kind).rglob(pattern)
    }
    return sorted(names)


def template_dirs() -> list[Path]:
    """Folders of sbatch templates, best first: PRIMERL_TEMPLATES, the state home's, then the shipped ones."""
    own = [env.templates(), env.state_home() / "templates" / "sbatch"]
    return [*(path for path in own if path is not None and path.is_dir()), *shipped_template_dirs()]


def shipped_template_dirs() -> list[Path]:
    shipped = [root for root in asset_roots() if root != env.state_home()]
    return [path for root in shipped if (path := root / "templates" / "sbatch").is_dir()]
