"""Rules of thumb: settings that usually waste time or quality, as warnings with the reason. Nothing is refused here."""

from __future__ import annotations

from collections.abc import Iterator

from primerl_hpc.common.names import Kind
from primerl_hpc.plan.assess.prediction import Prediction
from primerl_hpc.plan.predict.timing.host_cores import full_processes
from primerl_hpc.recipe.schedules import highest_factor
from primerl_hpc.recipe.schema.recipe import Recipe

MIN_BATCH, MIN_GROUP = 64, 8
HIGH_DISCARD = 0.2


def rules_of_thumb(
    recipe: Recipe, prediction: Prediction | None, *, walltime_s: float | None = None
) -> list[str]:
    """Return a sentence for each rule that the recipe breaks.

    ``prediction`` None: only rules that need none. ``walltime_s``: of a job; None: unlimited or unknown.
    """
    if recipe.kind not in (Kind.RL, Kind.SFT):
        return []
    found = list(_rollouts(recipe)) if recipe.kind == Kind.RL else []
    found += _schedule(recipe)
    found += _checkpoints(recipe, prediction, walltime_s)
    if prediction is not None and prediction.fits:
        found += _load(recipe, prediction)
        found += _memory(prediction)
        found += full_processes(
            prediction.figures,
            servers=sum(_number(environment.servers) for environment in recipe.environments.train),
            engines=prediction.choice.num_engines,
        )
    return found


def _number(servers: int | str) -> int:
    return servers if isinstance(servers, int) else 1


def _rollouts(recipe: Recipe) -> Iterator[str]:
    rollouts = recipe.rollouts
    if rollouts.batch_tokens is None and rollouts.batch_size < MIN_BATCH:
        yield (
            f"rollouts.batch_size {rollouts.batch_size} is below {MIN_BATCH}: the gradient of so few rollouts is "
            "noisy, and each step pays for a weight update"
        )
    compares = [algorithm for algorithm in recipe.algorithms if algorithm.compares_group]
    if compares and rollouts.group_size < MIN_GROUP:
        yield (
            f"rollouts.group_size {rollouts.group_size} is below {MIN_GROUP}: {compares[0].type} compares the "
            "rollouts of a group, and small groups often have equal rewards, which train nothing"
        )
    most = rollouts.sampling.max_tokens
    if most is not None and most >= recipe.seq_len:
        yield (
            f"rollouts.sampling.max_tokens {most} does not fit into seq_len {recipe.seq_len} with a prompt: the "
            "trainer truncates samples"
        )
    ceiling = rollouts.in_flight_ceiling
    if rollouts.batch_tokens is None and ceiling < rollouts.batch_size:
        yield (
            f"rollouts.max_in_flight {ceiling} is below batch_size {rollouts.batch_size}: a batch needs several "
            "rounds, and engines run few sequences at the end of each"
        )


def _schedule(recipe: Recipe) -> Iterator[str]:
    if recipe.max_steps is not None and (highest := highest_factor(recipe.scheduler, recipe.max_steps)) < 1:
        yield (
            f"scheduler: max_steps {recipe.max_steps} is too short for warm-up and decay, so that the learning rate "
            f"never exceeds {highest:.2f} of optimizer.lr; lower warmup_steps or decay_steps"
        )


def _checkpoints(recipe: Recipe, prediction: Prediction | None, walltime_s: float | None) -> Iterator[str]:
    interval = recipe.checkpoint.interval
    step = prediction.figures.get("time.step") if prediction is not None else None
    if interval is None or walltime_s is None or step is None:
        return
    between_s = interval * step.value
    if between_s > walltime_s:
        yield (
            f"checkpoint.interval {interval} is about {between_s / 3600:.1f} h of steps, longer than the walltime of "
            f"{walltime_s / 3600:.1f} h: a lost node loses all work of its job; lower it"
        )


def _load(recipe: Recipe, prediction: Prediction) -> Iterator[str]:
    concurrency, run = prediction.figures.get("kv.concurrency"), prediction.run
    if recipe.kind != Kind.RL or concurrency is None:
        return
    room = concurrency.value * prediction.choice.num_engines
    if prediction.choice.max_in_flight > 1.2 * room and recipe.rollouts.adaptive_concurrency is None:
        yield (
            f"{prediction.choice.max_in_flight} rollouts may be in flight, but the KV caches hold about {room:,.0f}: "
            "the others wait, or vLLM discards work (preemption); lower rollouts.max_in_flight or set "
            "adaptive_concurrency"
        )
    if run is None:
        return
    key = "max_off_policy_steps" if recipe.rollouts.explicit_level is None else "async_level"
    if run.discarded > HIGH_DISCARD:
        yield (
            f"{run.discarded:.0%} of the rollouts become too old for their batch; raise rollouts.{key} "
            "or lower max_in_flight"
        )
    if recipe.rollouts.max_lead == 0 and not recipe.layout.takes_turns:
        yield (
            f"rollouts.{key} 0 is synchronous: engines and trainer take turns, and each is idle while "
            "the other works"
        )


def _memory(prediction: Prediction) -> Iterator[str]:
    for name, limit in prediction.limits.items():
        figure = prediction.figures.get(name)
        if figure is not None and name == "memory.trainer" and figure.high > limit:
            yield (
                f"the trainer's memory may not suffice: predicted {figure.value / 2**30:.1f} GiB a GPU, up to "
                f"{figure.high / 2**30:.1f} of {limit / 2**30:.1f}"
            )
