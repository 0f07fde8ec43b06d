"""Check a composed run before anything is written: a table of checks in the order of their findings.

    check(submission)                               # all of them; prints warnings, raises the first error
    findings("software", Candidate(planned))        # one of them: returns warnings

What would fail only after hours in the queue is refused here. The checks themselves are in `checks`, `planning`,
`prefetch` and `doctor.site`; those that need only the plan are in this module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from primerl_hpc.checks.recipe.chat_template import renderer_warning
from primerl_hpc.checks.recipe.environments import check_environments
from primerl_hpc.checks.recipe.model_config import refuse_untrainable
from primerl_hpc.checks.recipe.software import check_software
from primerl_hpc.checks.recipe.token_ids import check_token_ids
from primerl_hpc.checks.site import check_site
from primerl_hpc.cluster.load import LoadedProfile
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common import env
from primerl_hpc.common.document import Document
from primerl_hpc.common.errors import ConfigError, NotFoundError, PrimerlError
from primerl_hpc.common.interpreters import Interpreters
from primerl_hpc.common.log import show_warnings
from primerl_hpc.common.names import MAIN_PHASE, Kind
from primerl_hpc.export.export import check_target
from primerl_hpc.launch.compose import ONE_JOB, ChainRequest, PlannedRun, Submission, compose
from primerl_hpc.launch.planning.forecast import refuse_misfit
from primerl_hpc.launch.planning.hour_budget import check_new_budget, hours_warning
from primerl_hpc.offline.bundle.manifest import note_changes
from primerl_hpc.offline.prefetch.check import check_needs, check_packages, prefetch_command
from primerl_hpc.plan.plan import Plan
from primerl_hpc.recipe.custom_code import note_custom_code
from primerl_hpc.recipe.load import LoadedRecipe
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.access.ownership import check_parents

MOST_LINKS = 100


@dataclass(frozen=True)
class Candidate:
    """A planned run with the request for its jobs."""

    planned: PlannedRun
    chain: ChainRequest = ONE_JOB
    interpreters: Interpreters = field(default_factory=Interpreters)
    missing: list[PrimerlError] | None = None
    """Collects the error about missing models and files instead of raising it."""

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe of the main phase."""
        return self.plan.phase(MAIN_PHASE).recipe

    @property
    def document(self) -> Document:
        """The recipe's text, for locations."""
        return self.planned.recipe.document

    @property
    def prefetch(self) -> str:
        """The command that fetches what is missing, for hints."""
        return prefetch_command(self.planned.recipe, self.planned.profile)

    @property
    def profile(self) -> Profile:
        return self.planned.profile.profile


def check_run(
    loaded: LoadedRecipe,
    profile: LoadedProfile,
    chain: ChainRequest = ONE_JOB,
    root: Path | None = None,
    missing: list[PrimerlError] | None = None,
    *,
    is_live: bool = False,
) -> Submission:
    """Compose and check a run without writing anything; ``root`` and ``is_live`` as in `compose`.

    ``missing``: collects the errors about missing models and files instead of raising them. Raises ConfigError,
    OccupiedError, NotFoundError, DataError.
    """
    submission = compose(loaded, profile, root, missing, budget=chain.budget, is_live=is_live)
    check(submission, chain, missing)
    return submission


def check(
    submission: Submission,
    chain: ChainRequest = ONE_JOB,
    missing: list[PrimerlError] | None = None,
    *,
    only: Sequence[str] = (),
) -> None:
    """Check everything that can be checked before submission; print warnings about the rest to stderr.

    ``missing`` as in `Candidate`. ``only``: names in `CHECKS`; empty: all of them.
    Raises ConfigError, OccupiedError, NotFoundError, DataError.
    """
    show_warnings(submission.warnings)
    with Interpreters() as interpreters:
        candidate = Candidate(submission, chain, interpreters, missing)
        for name in only or CHECKS:
            show_warnings(findings(name, candidate))
    note_custom_code(submission.recipe.recipe)


def findings(name: str, candidate: Candidate) -> list[str]:
    """Return the warnings of one of `CHECKS`. Raises what it refuses."""
    return [warning for warning in CHECKS[name](candidate) or () if warning]


# -- checks of the plan ----------------------------------------------------------------------------


def check_chain(request: ChainRequest, plan: Plan) -> None:
    """Raise ConfigError if the request contradicts itself, the profile or the recipe."""
    if request.is_here and plan.scheduler != "slurm":
        hint = "omit --here: this profile starts runs on this machine anyway"
        raise ConfigError("--here needs a profile whose scheduler.type is slurm", hint=hint)
    has_more = plan.num_elastic or plan.phases[-1].recipe.after is not None
    if request.is_here and (request.is_chain or has_more):
        raise ConfigError(
            "--here starts one job: it excludes --chain, --until-done, elastic engines and after:"
        )
    if not request.is_chain:
        return
    if request.links > 1 and request.is_until_done:
        raise ConfigError("--chain and --until-done cannot be combined", hint="use one of them")
    if plan.scheduler != "slurm":
        raise ConfigError(
            f"profile '{plan.profile_name}' has no walltime, so one job is sufficient",
            hint="remove --chain and --until-done",
        )
    if plan.kind not in (Kind.RL, Kind.SFT):
        raise ConfigError(
            f"a chain continues from checkpoints, but a run of kind {plan.kind.value} writes none",
            hint="increase scheduler.time in the profile instead",
        )
    if plan.num_elastic:
        raise ConfigError(
            "elastic engines belong to one job, which continues by requeue",
            hint="remove --chain and --until-done",
        )
    if not 1 <= request.links <= MOST_LINKS:
        raise ConfigError(f"--chain {request.links} is out of range: use 1 to {MOST_LINKS}")


def check_keys(plan: Plan, profile: Profile) -> None:
    """Raise ConfigError if an external server needs a key that is not set in the environment, which the job inherits.

    Setup lines of the profile may export the key on the node; then this cannot be checked.
    """
    if profile.software.setup:
        return
    for phase in plan.phases:
        for process in (*phase.processes, *phase.elastic):
            for name, source in process.inherited_env.items():
                if env.variable(source) is None:
                    raise ConfigError(
                        f"{name} of {process.name} is read from the environment variable {source}, which is not set",
                        hint=f"export {source} before you submit",
                    )
        if (evaluation := phase.recipe.evaluation) is not None and evaluation.external is not None:
            evaluation.external.key()
        for model in (phase.recipe.teacher, phase.recipe.judge):
            if model is not None:
                model.key()


def _bundle_warnings(run: Candidate) -> list[str | None]:
    bundle = run.plan.bundle
    return [] if bundle is None else [note_changes(Path(bundle.path), Path(sys.prefix))]


def _check_export(run: Candidate) -> None:
    if (export := run.plan.after.export) is not None:
        check_target(Path(export.to), option="after.export.to")


def _check_needs(run: Candidate) -> list[str]:
    try:
        return check_needs(run.planned.needs, run.plan, run.profile, run.prefetch)
    except NotFoundError as error:
        if run.missing is None:
            raise
        run.missing.append(error)
        return []


# -- the table -------------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[Candidate], Iterable[str | None] | None]] = {
    "chain": lambda run: check_chain(run.chain, run.plan),
    "parent folders": lambda run: check_parents(
        Path(run.plan.run_dir), is_allowed=run.plan.allow_shared_parent
    ),
    "export": _check_export,
    "keys": lambda run: check_keys(run.plan, run.profile),
    "site": lambda run: check_site(run.plan, run.profile),
    "bundle": _bundle_warnings,
    "model": lambda run: refuse_untrainable(run.recipe, run.planned.model, run.plan.accelerator),
    "token ids": lambda run: check_token_ids(run.recipe, run.planned.model),
    "rules of thumb": lambda run: run.planned.forecast.warnings,
    "memory": lambda run: refuse_misfit(run.planned.forecast),
    "budget": lambda run: check_new_budget(run.plan),
    "hours": lambda run: [hours_warning(run.plan, run.planned.forecast)],
    "software": lambda run: check_software(run.plan, run.document, run.interpreters),
    "packages": lambda run: check_packages(run.planned.needs, run.prefetch),
    "environments": lambda run: check_environments(
        run.plan, run.planned.profile, run.document, run.interpreters
    ),
    "renderer": lambda run: [renderer_warning(run.recipe, run.planned.profile, run.interpreters)],
    "models and data": _check_needs,
}
"""Checks by name, in the order in which `check` prints and raises what they find.

Each returns warnings, None or empty ones if there are none, and raises what it refuses.
"""
