"""Render the script that unpacks a bundle on a node: launch/unpack-bundle.sh of a run."""

from __future__ import annotations

import re

from primerl_hpc.plan.plan import BUNDLE_MANIFEST, BundlePlan
from primerl_hpc.render.engine import quote_word, render_template

UNPACK_SCRIPT = "unpack-bundle.sh"
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def render_unpack(bundle: BundlePlan, *, owner: str, scratch: str | None, may_be_shared: bool = False) -> str:
    """Return the script. ``owner``: the run, for a comment. ``scratch``: the profile's, expanded on the node.

    ``may_be_shared``: unpack also where other users can rename folders.
    """
    return render_template(
        f"{UNPACK_SCRIPT}.j2",
        owner=owner,
        bundle=bundle,
        manifest=BUNDLE_MANIFEST,
        base=shell_folder(scratch),
        may_be_shared=may_be_shared,
    )


def shell_folder(scratch: str | None) -> str:
    """Return the expression of bash for a folder with ``~`` and ``$VARIABLES``; None: the temporary folder.

    A variable that is not set on the node ends the script with a message.
    """
    if scratch is None:
        # TMPDIR of the submitting shell need not exist on this node
        return '"$([ -w "${TMPDIR:-}" ] && echo "$TMPDIR" || echo /tmp)"'
    text, home = (scratch[1:], '"$HOME"') if scratch == "~" or scratch.startswith("~/") else (scratch, "")
    parts, end = [home], 0
    for match in _VARIABLE.finditer(text):
        parts += [quote_word(text[end : match.start()]) if match.start() > end else ""]
        parts += [f'"${{{match[1] or match[2]}:?is not set on this node; correct scratch of the profile}}"']
        end = match.end()
    parts += [quote_word(text[end:]) if text[end:] else ""]
    return "".join(parts)
