"""The Jinja engine: strict about missing variables, and every interpolated value goes through a quoting filter.

``q`` quotes for the shell, ``directive`` for an ``#SBATCH`` line, which SLURM parses with quotes of its own and where
a line break would start a new line of the script.
"""

from __future__ import annotations

import re
import shlex

import jinja2

from primerl_hpc.cluster.directives import options
from primerl_hpc.common.assets import template_dirs
from primerl_hpc.common.errors import ConfigError, NotFoundError

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


def make_engine() -> jinja2.Environment:
    engine = jinja2.Environment(
        loader=jinja2.FileSystemLoader([str(path) for path in template_dirs()]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    engine.filters["q"] = lambda value: shlex.quote(str(value))
    engine.filters["directive"] = quote_directive
    engine.globals["options"] = options
    return engine


def render_template(name: str, **variables: object) -> str:
    """Raises NotFoundError for a template that is nowhere, ConfigError for one that does not render."""
    try:
        return make_engine().get_template(name).render(**variables)
    except jinja2.TemplateNotFound as error:
        raise NotFoundError(f"no template '{error.name}'") from None
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"template: {error.message}", place=f"{error.filename}:{error.lineno}") from None
    except jinja2.UndefinedError as error:
        raise ConfigError(f"template {name}: {error.message}") from None
