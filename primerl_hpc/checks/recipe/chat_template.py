"""Compare a renderer that is chosen by hand with the model's own chat template, before submission.

A renderer of another family trains and samples a format that the model does not know, without any error.
"""

from __future__ import annotations

from collections.abc import Mapping

from primerl_hpc.checks.recipe.model_config import find_file
from primerl_hpc.cluster.load import LoadedProfile
from primerl_hpc.common.interpreters import InterpreterError, Interpreters, UsualAnswer
from primerl_hpc.common.names import Kind, Role
from primerl_hpc.plan.env import process_env
from primerl_hpc.recipe.renderer import COMPARISON, uses_renderer
from primerl_hpc.recipe.schema.recipe import Recipe

_OWN_TEMPLATE = ("auto", "default")
"""Renderers that follow from the model's name or use its template."""


def renderer_warning(recipe: Recipe, profile: LoadedProfile, interpreters: Interpreters) -> str:
    """Return a warning about the first token that differs in a plain conversation; empty if there is none.

    Nothing is compared if the renderer runs in a container, without a chat template on this machine, or if the
    tokenizer has code of its own (``trust_remote_code``). Raises ConfigError for a renderer that does not fit the
    tokenizer.
    """
    role = Role.SFT if recipe.kind == Kind.SFT else Role.ENV_SERVER
    software, variables = profile.profile.software.of_role(role), process_env(role, recipe, profile.profile)
    model = recipe.model
    name = model.tokenizer or model.name
    is_checked = uses_renderer(recipe) and model.renderer.name not in _OWN_TEMPLATE
    if not is_checked or software.container.kind != "none" or model.trust_remote_code:
        return ""
    if not _has_template(name, variables):
        return ""
    request = model.model_dump(mode="json", include={"name", "tokenizer", "renderer"})
    python = software.python or profile.profile.software.python_here
    try:
        expected = UsualAnswer(None, _tokenizer_files(name, variables))
        difference = interpreters.ask_unless_unchanged(python, variables, COMPARISON, request, expected)
    except InterpreterError as error:
        return f"renderer '{model.renderer.name}' was not compared with the chat template of {name}: {error.cause}"
    if difference is None:
        return ""
    return (
        f"renderer '{model.renderer.name}' differs from the chat template of {name} in a plain conversation at "
        f"{difference}. If the model was trained with its template, set model.renderer.name to its family"
    )


def _tokenizer_files(name: str, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the files of a model's folder but for its weights."""
    folder = find_file(name, "tokenizer_config.json", variables)
    files = sorted(folder.parent.iterdir()) if folder is not None else []
    return tuple(str(path) for path in files if path.suffix in (".json", ".jinja", ".model", ".txt"))


def _has_template(name: str, variables: Mapping[str, str]) -> bool:
    if find_file(name, "chat_template.jinja", variables) is not None:
        return True
    settings = find_file(name, "tokenizer_config.json", variables)
    return settings is not None and '"chat_template"' in settings.read_text("utf-8", errors="replace")
