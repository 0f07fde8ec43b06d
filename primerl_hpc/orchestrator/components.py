"""Build the train loop's components from the recipe. Each function builds one; `build_components` connects them."""

from __future__ import annotations

from dataclasses import dataclass

from primerl_hpc.envs.tasks import fingerprint_of
from primerl_hpc.orchestrator.batches.batcher import BatchBuilder
from primerl_hpc.orchestrator.checkpoint.state import LoopState
from primerl_hpc.orchestrator.driver import RolloutDriver, env_bounds
from primerl_hpc.orchestrator.evaluation import Evaluator
from primerl_hpc.orchestrator.rollout_data import Split
from primerl_hpc.orchestrator.rollouts.distillation import Distillation
from primerl_hpc.orchestrator.rollouts.environments import EnvHandle
from primerl_hpc.orchestrator.rollouts.runner import RolloutRunner
from primerl_hpc.orchestrator.scheduling.concurrency import Concurrency
from primerl_hpc.orchestrator.scheduling.dispatcher import Dispatcher, DispatchLimits
from primerl_hpc.orchestrator.scheduling.sampler import TaskSampler
from primerl_hpc.orchestrator.scoring.scoring import Scorer
from primerl_hpc.orchestrator.setup import RouterAddress, make_concurrency
from primerl_hpc.plan.plan import PhasePlan
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir


@dataclass(frozen=True)
class Components:
    """Objects that connect the train loop to the engines and the trainer."""

    resumed: int
    """Step of the checkpoint from which the run resumes; 0 at the start."""
    sampler: TaskSampler
    concurrency: Concurrency | None
    dispatcher: Dispatcher
    builder: BatchBuilder
    evaluator: Evaluator
    runner: RolloutRunner
    driver: RolloutDriver
    state: LoopState


def build_components(
    run: RunDir,
    phase: PhasePlan,
    router: RouterAddress,
    envs: dict[Split, list[EnvHandle]],
    vocab_size: int,
    distillation: Distillation,
) -> Components:
    recipe, resumed = phase.recipe, run.latest_checkpoint() or 0
    sampler = build_sampler(recipe, envs)
    concurrency = make_concurrency(recipe.rollouts)
    dispatcher = build_dispatcher(recipe, sampler, concurrency, envs, resumed)
    builder = build_batch_builder(phase, vocab_size)
    evaluator = build_evaluator(run, recipe, envs, resumed)
    runner = RolloutRunner(
        recipe,
        envs,
        live_version=lambda: dispatcher.version,
        router_url=lambda: router.url,
        distillation=distillation,
    )
    driver = RolloutDriver(run, recipe, dispatcher, evaluator, runner, router)
    traces = driver.traces
    state = LoopState(sampler, dispatcher, builder, traces[Split.TRAIN], traces[Split.EVAL], evaluator)
    return Components(resumed, sampler, concurrency, dispatcher, builder, evaluator, runner, driver, state)


def build_sampler(recipe: Recipe, envs: dict[Split, list[EnvHandle]]) -> TaskSampler:
    environments = recipe.environments.train
    return TaskSampler(
        [len(handle.tasks) for handle in envs[Split.TRAIN]],
        [environment.ratio for environment in environments],
        recipe.seed,
        [environment.curriculum for environment in environments],
        [fingerprint_of(handle.tasks) for handle in envs[Split.TRAIN]],
        accepts_changes=recipe.checkpoint.accept_changed_data,
    )


def build_dispatcher(
    recipe: Recipe,
    sampler: TaskSampler,
    concurrency: Concurrency | None,
    envs: dict[Split, list[EnvHandle]],
    resumed: int,
) -> Dispatcher:
    rollouts = recipe.rollouts
    return Dispatcher(
        next_task=sampler.next,
        limits=DispatchLimits(
            group_size=rollouts.group_size,
            batch_size=rollouts.batch_size,
            max_in_flight=concurrency.limit if concurrency else rollouts.in_flight_ceiling,
            max_off_policy_steps=rollouts.max_age,
            async_level=rollouts.explicit_level,
            **env_bounds(envs),
        ),
        last_step=recipe.steps,
        step=resumed + 1,
        version=resumed,
        frozen_envs=frozenset(
            index for index, algorithm in enumerate(recipe.algorithms) if algorithm.samples_from == "teacher"
        ),
    )


def build_batch_builder(phase: PhasePlan, vocab_size: int) -> BatchBuilder:
    recipe = phase.recipe
    return BatchBuilder(
        recipe.rollouts,
        Scorer(recipe, vocab_size),
        seq_len=recipe.seq_len,
        num_ranks=phase.num_data_ranks,
        env_names=[environment.label for environment in recipe.environments.train],
    )


def build_evaluator(
    run: RunDir, recipe: Recipe, envs: dict[Split, list[EnvHandle]], resumed: int
) -> Evaluator:
    return Evaluator(
        recipe.environments,
        [len(handle.tasks) for handle in envs[Split.EVAL]],
        recipe.steps,
        {version for version in read_steps(run.metrics("eval")) if version <= resumed},
    )
