"""The Jinja engine: strict about missing variables, and every interpolated value goes through a quoting filter.

``q`` quotes for the shell, ``directive`` for an ``#SBATCH`` line, which SLURM parses with quotes of its own and where
a line break would start a new line of the script.

Templates are looked for in the folders of `template_dirs`, the user's own before the shipped ones, file by file; under
``shipped/`` a user's template finds the original that it takes the place of, to extend or include it.
"""

from __future__ import annotations

import re
import shlex
import traceback
from collections.abc import Sequence
from pathlib import Path

import jinja2

from primerl_hpc.cluster.directives import options
from primerl_hpc.common.assets import shipped_template_dirs, template_dirs
from primerl_hpc.common.errors import ConfigError, NotFoundError, PrimerlError

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./\-\[\]~]*")


def quote_directive(value: object) -> str:
    """A value behind ``--key=`` in an #SBATCH line.

    Raises ConfigError for control characters: no quoting makes them safe there.
    """
    text = str(value)
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise ConfigError(
            f"{text!r} cannot stand in an #SBATCH line: it has a line break or control character"
        )
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def quote_word(value: object) -> str:
    """A value as one word of the shell. Raises ConfigError for a NUL, which bash drops in silence."""
    if "\0" in str(value):
        raise ConfigError(f"{str(value)!r} cannot stand in a script: it has a NUL character")
    return shlex.quote(str(value))


def make_engine(first: Sequence[Path] = ()) -> jinja2.Environment:
    """``first``: folders that come before all others."""
    shipped = jinja2.FileSystemLoader([str(path) for path in shipped_template_dirs()])
    every = jinja2.FileSystemLoader([str(path) for path in (*first, *template_dirs())])
    engine = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PrefixLoader({"shipped": shipped}), every]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    engine.filters["q"] = quote_word
    engine.filters["directive"] = quote_directive
    engine.globals["options"] = options
    return engine


def render_template(name: str, *, first: Sequence[Path] = (), **variables: object) -> str:
    """Raises NotFoundError for a template that is nowhere, ConfigError with file and line for one that does not render."""
    try:
        return make_engine(first).get_template(name).render(**variables)
    except jinja2.TemplateNotFound as error:
        place = _place(error)
        folders = ", ".join(str(path) for path in (*first, *template_dirs()))
        raise NotFoundError(f"no template '{error.name}'", place=place, mend=f"looked in {folders}") from None
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"template: {error.message}", place=f"{error.filename}:{error.lineno}") from None
    except jinja2.UndefinedError as error:
        known = ", ".join(sorted(variables))
        raise ConfigError(
            f"template: {error.message}", place=_place(error) or name, mend=f"variables are {known}"
        ) from None
    except PrimerlError:
        raise
    except Exception as error:  # noqa: BLE001 - a template is a program: whatever it raises is its author's to know
        raise ConfigError(f"template: {type(error).__name__}: {error}", place=_place(error) or name) from None


def _place(error: BaseException) -> str:
    """``file:line`` of the innermost template, as Jinja puts it into the traceback; empty when none was running."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(".j2")]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
