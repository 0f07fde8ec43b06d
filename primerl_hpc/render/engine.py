"""The Jinja engine: undefined variables are errors, and every interpolated value passes a quoting filter.

``q`` quotes for the shell, ``directive`` for an ``#SBATCH`` line, which SLURM parses with its own quoting rules and in
which a line break would start a new line of the script.

Each template is searched in the folders of `template_dirs`, the user's before the shipped ones. A user's template can
extend or include the original that it replaces under the prefix ``shipped/``.
"""

from __future__ import annotations

import re
import shlex
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import jinja2

from primerl_hpc.cluster.directives import options
from primerl_hpc.common.assets import shipped_template_dirs, template_dirs
from primerl_hpc.common.errors import ConfigError, NotFoundError, PrimerlError
from primerl_hpc.common.safety.odd_text import odd_character

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./\-\[\]~]*")


class ShellText(str):
    """A word of the shell that filter ``q`` leaves as it is, such as an expression with a variable."""


def quote_directive(value: object) -> str:
    """Quote a value after ``--key=`` in an #SBATCH line.

    Raises ConfigError for control characters, which cannot be quoted.
    """
    text = str(value)
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise ConfigError(
            f"{text!r} cannot be used in an #SBATCH line: it contains a line break or control character"
        )
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def quote_word(value: object) -> str:
    """Quote a value as one word of the shell. Raises ConfigError for a NUL character, which bash silently drops."""
    if isinstance(value, ShellText):
        return value
    if "\0" in str(value):
        raise ConfigError(f"{str(value)!r} cannot be used in a script: it contains a NUL character")
    return shlex.quote(str(value))


class _TemplateLoader(jinja2.FileSystemLoader):
    """Template loader that rejects files which are not plain text, with file and line."""

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str, Callable[[], bool]]:
        try:
            source, path, is_current = super().get_source(environment, template)
        except UnicodeDecodeError as error:
            raise ConfigError(f"not a UTF-8 text file ({error.reason})", location=template) from None
        for number, line in enumerate(source.split("\n"), start=1):
            if (found := odd_character(line)) is not None:
                raise ConfigError(
                    f"template: the line contains {found}", location=f"{path}:{number}", hint="remove it"
                )
        return source, path, is_current


def make_engine(first: Sequence[Path] = ()) -> jinja2.Environment:
    """Return the Jinja environment. ``first``: folders with the highest priority."""
    shipped = _TemplateLoader([str(path) for path in shipped_template_dirs()])
    all_folders = _TemplateLoader([str(path) for path in (*first, *template_dirs())])
    engine = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PrefixLoader({"shipped": shipped}), all_folders]),
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
    """Render a template. Raises NotFoundError for a missing one, ConfigError with file and line if rendering fails."""
    try:
        return make_engine(first).get_template(name).render(**variables)
    except jinja2.TemplateNotFound as error:
        location = _location(error)
        folders = ", ".join(str(path) for path in (*first, *template_dirs()))
        raise NotFoundError(
            f"no template '{error.name}'", location=location, hint=f"searched in {folders}"
        ) from None
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"template: {error.message}", location=f"{error.filename}:{error.lineno}") from None
    except jinja2.UndefinedError as error:
        known = ", ".join(sorted(variables))
        raise ConfigError(
            f"template: {error.message}", location=_location(error) or name, hint=f"known variables: {known}"
        ) from None
    except PrimerlError:
        raise
    except Exception as error:  # noqa: BLE001 - templates can raise anything; report it to their author
        raise ConfigError(
            f"template: {type(error).__name__}: {error}", location=_location(error) or name
        ) from None


def _location(error: BaseException) -> str:
    """Return ``file:line`` of the innermost template in the traceback; empty if none was running."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(".j2")]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
