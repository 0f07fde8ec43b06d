"""Make the text of a new recipe, and check it by planning it.

draft = make_draft(request)                  # ConfigError: unknown model, too few GPUs
draft.text, draft.loaded                     # YAML with comments, and the recipe that it describes
write_draft(draft, Path("my.yaml"), is_forced=False)
"""

from __future__ import annotations

import shlex
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

from primerl_hpc.checks.recipe.model_config import find_config, read_model
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.document import Document, dump_flow
from primerl_hpc.common.errors import ConfigError, OccupiedError
from primerl_hpc.common.files import create_exclusive, write_text
from primerl_hpc.common.safety.printable import one_line
from primerl_hpc.launch.new_recipe.blocks import Entry, task_entries, with_default_layout, with_layout
from primerl_hpc.launch.new_recipe.request import RecipeRequest
from primerl_hpc.launch.new_recipe.sizing import Sized, check_number, choose_layout, fewest_gpus
from primerl_hpc.launch.planning.forecast import case_for
from primerl_hpc.recipe.load import LoadedRecipe, load_recipe, parse_recipe
from primerl_hpc.recipe.schema.recipe import Recipe

WIDTH = 110


@dataclass(frozen=True)
class Draft:
    request: RecipeRequest
    text: str
    loaded: LoadedRecipe
    sized: Sized | None
    """None on a profile without GPUs, and where nothing can be predicted."""


def make_draft(request: RecipeRequest, file_name: str = "recipe.yaml") -> Draft:
    """Return the recipe for a request. ``file_name`` is used in its comments and in errors.

    Raises ConfigError for an unknown model, fewer GPUs than it needs, or answers that do not fit together.
    """
    profile = request.profile.profile
    entries = task_entries(request, find_config(request.model, {}))
    recipe, sized = _parse(entries), None
    if profile.node.gpus:
        gpus = request.gpus or profile.nodes * profile.node.gpus
        check_number(profile, gpus)
        if reason := _unpredicted(recipe, profile):
            entries = with_default_layout(request, entries, reason)
        else:
            sized = choose_layout(recipe, profile, gpus)
            if sized is None:
                raise _too_few(request, recipe, gpus)
            entries = with_layout(request, entries, sized)
    text = _text(request, entries, file_name)
    return Draft(request, text, _load(text, file_name), sized)


def write_draft(draft: Draft, path: Path, *, is_forced: bool) -> None:
    """Write the file. Raises OccupiedError if it exists, unless ``is_forced``."""
    if is_forced:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, draft.text)
    elif not create_exclusive(path, draft.text):
        raise occupied(path)


def occupied(path: Path) -> OccupiedError:
    return OccupiedError(f"{path} exists", hint="choose another file, or replace it with --force")


def _unpredicted(recipe: Recipe, profile: Profile) -> str:
    """Return why nothing can be predicted: an unknown family or GPU type; empty if it can."""
    try:
        case_for(recipe, profile, read_model(recipe, profile))
    except ConfigError as error:
        return error.cause
    return ""


def _parse(entries: list[Entry]) -> Recipe:
    try:
        return parse_recipe({entry.key: entry.value for entry in entries})
    except ValueError as error:
        raise ConfigError(f"these values make no valid recipe: {_first_line(error)}") from None


def _first_line(error: ValueError) -> str:
    details = getattr(error, "errors", None)
    if details is None:
        return str(error)
    first = details(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _too_few(request: RecipeRequest, recipe: Recipe, gpus: int) -> ConfigError:
    profile = request.profile.profile
    needed = fewest_gpus(recipe, profile)
    what = f"{request.model} with kind {request.kind}"
    kind = profile.node.gpu
    most = profile.nodes * profile.node.gpus
    if needed is None:
        return ConfigError(
            f"{what} fits on no number of nodes of profile '{profile.name}'",
            hint="use GPUs with more memory, a smaller --seq-len, or --lora RANK",
        )
    hint = (
        f"use --gpus {needed}"
        if needed <= most
        else f"profile '{profile.name}' has {most} GPUs; use a larger one"
    )
    if request.lora_rank is None and request.kind != "evaluation":
        hint += ", or train adapters with --lora RANK, which need less memory"
    return ConfigError(f"{what} needs at least {needed} GPUs of type {kind}, {gpus} were given", hint=hint)


# -- text ------------------------------------------------------------------------------------------


def _word(text: str) -> str:
    """Return a word of a command line in a comment."""
    return shlex.quote(one_line(text))


def _text(request: RecipeRequest, entries: list[Entry], file_name: str) -> str:
    title = {
        "rl": f"Reinforcement learning of {request.model} on {request.environment}.",
        "sft": f"Supervised fine-tuning of {request.model} on {request.data}.",
        "distillation": f"Distillation of {request.teacher} into {request.model} on {request.environment}.",
        "evaluation": f"Evaluation of {request.model} on {request.environment}.",
    }[request.kind]
    head = [
        *_comment(title),
        "#",
        f"#   primerl-hpc submit {_word(file_name)} -p {_word(request.profile_name)}",
        "#",
        *_comment("primerl-hpc explain KEY describes a key, and --set KEY=VALUE changes it for one run."),
    ]
    lines = list(head)
    for entry in entries:
        for paragraph in entry.comments:
            lines += _comment(paragraph)
        lines += dump(entry).splitlines()
    return "\n".join(lines) + "\n"


def _comment(paragraph: str) -> list[str]:
    text = one_line(
        paragraph, limit=len(paragraph) * 10
    )  # names of models and files may contain line breaks of YAML
    return [f"# {line}" for line in textwrap.wrap(text, WIDTH - 2, break_on_hyphens=False)]


def dump(entry: Entry) -> str:
    """Return the YAML of an entry: scalars and small blocks in one line, others with a line for each key."""
    line = _flow(entry)
    if len(line) <= 80 or not isinstance(entry.value, dict):
        return line
    lines = [f"{entry.key}:"]
    for key, value in entry.value.items():
        lines += [f"  {part}" for part in _flow(Entry(key, value)).splitlines()]
    return "\n".join(lines)


def _flow(entry: Entry) -> str:
    if isinstance(entry.value, list) and len(dump_flow(entry.value)) > 70:
        return "\n".join([f"{entry.key}:", *(f"  - {dump_flow(item)}" for item in entry.value)])
    return f"{entry.key}: {dump_flow(entry.value)}"


def _load(text: str, file_name: str) -> LoadedRecipe:
    """Return the recipe of ``text`` as a user's file would be loaded; locations name ``file_name``.

    Raises ConfigError.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(text)
        loaded = load_recipe(str(path))
    origins = {key: origin.replace(str(path), file_name) for key, origin in loaded.document.origins.items()}
    return LoadedRecipe(loaded.recipe, Document(loaded.document.values, origins), Path(file_name))
