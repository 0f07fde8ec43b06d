"""The recipe and profile that a benchmark measures: those of a recipe file, or those of a prepared run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from primerl_hpc.cluster.load import LoadedProfile, load_profile
from primerl_hpc.common.document import Document
from primerl_hpc.common.names import MAIN_PHASE
from primerl_hpc.launch.submit import check_job_changes
from primerl_hpc.plan.plan import load_plan
from primerl_hpc.recipe.load import LoadedRecipe
from primerl_hpc.recipe.resolve import resolve
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.rundir import RunDir


@dataclass(frozen=True)
class BenchTarget:
    loaded: LoadedRecipe
    profile: LoadedProfile
    folder: Path
    """Where the temporary run directory is created."""

    def resolved(self, recipe: Recipe) -> Recipe:
        """Return a changed recipe with absolute paths. Raises NotFoundError or DataError for missing files."""
        return resolve(replace(self.loaded, recipe=recipe))


def target_of_run(run: RunDir, job_changes: Sequence[str]) -> BenchTarget:
    """Return the target of a prepared run: the model that its main phase starts with, if that exists.

    ``job_changes`` (``scheduler.time=60``) apply to the job that measures. Raises ConfigError for other changes.
    """
    check_job_changes(job_changes)
    phase = load_plan(run).phase(MAIN_PHASE)
    recipe = phase.recipe
    if Path(phase.model_path).is_dir():  # not before a warm-up has created it
        tokenizer = recipe.model.tokenizer or recipe.model.name
        model = recipe.model.model_copy(update={"name": phase.model_path, "tokenizer": tokenizer})
        recipe = recipe.model_copy(update={"model": model})
    document = Document(recipe.model_dump(mode="json", exclude_defaults=True))
    profile = load_profile(str(run.profile), overrides=job_changes, environ={})
    return BenchTarget(LoadedRecipe(recipe, document, run.recipe), profile, run.root)
