"""Which blocks of a recipe exclude or need one another: every function raises ValueError with the sentence a user reads.

`check_combinations` is called once all blocks are valid by themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from primerl_hpc.common.names import Kind, Role
from primerl_hpc.recipe.algorithm_schema import NEED_TEACHER, SCORED

if TYPE_CHECKING:
    from primerl_hpc.recipe.schema import Recipe

ROUTERS = ("gate", "router")  # what mixtures of experts of all families call theirs
COMPARED = ("grpo", "grpo_std", "rloo", "opo", "max_rl")  # with their group, and by nothing else
_ANOTHER = "the trainer would judge tokens by another distribution than they were sampled from"
UNKNOWN_TO_THE_TRAINER = {
    "seed": "the rollouts of a group would be alike",
    "n": "a rollout is one reply",
    "repetition_penalty": _ANOTHER,
    "frequency_penalty": _ANOTHER,
    "presence_penalty": _ANOTHER,
    "logit_bias": _ANOTHER,
}
MAX_SERVED_RANK = 512  # vLLM 0.31's largest --max-lora-rank


def check_combinations(recipe: Recipe) -> None:
    """The first that does not fit is told."""
    for check in (
        kind_has_its_blocks,
        groups_can_be_compared,
        sampling_fits,
        after_has_its_blocks,
        adapters_can_be_served,
        tokens_can_be_carried,
        routers_can_be_replayed,
        teacher_is_there_where_it_is_needed,
        judge_has_a_place,
        prefill_fits,
    ):
        check(recipe)


def kind_has_its_blocks(recipe: Recipe) -> None:
    if recipe.kind in (Kind.RL, Kind.SFT) and recipe.max_steps is None:
        raise ValueError(f"kind {recipe.kind} needs max_steps")
    if recipe.kind == Kind.RL and not recipe.environments.train:
        raise ValueError("kind rl needs at least one environment under environments.train")
    if recipe.kind == Kind.EVAL and not recipe.environments.eval:
        raise ValueError("kind eval needs at least one environment under environments.eval")
    if recipe.kind == Kind.SFT and recipe.sft is None:
        raise ValueError("kind sft needs an sft block")
    if recipe.evaluation is not None and recipe.kind != Kind.EVAL:
        raise ValueError(
            "evaluation belongs to kind eval; what comes after a training run is after.evaluation"
        )
    if recipe.warmup is not None and recipe.kind != Kind.RL:
        raise ValueError("warmup belongs to kind rl")
    if recipe.warmup is not None and recipe.warmup.checkpoint.fork is not None:
        raise ValueError("warmup.checkpoint.fork: a warm-up starts from the model; leave out fork or warmup")
    if (fork := recipe.checkpoint.fork) is not None:
        if recipe.kind not in (Kind.RL, Kind.SFT) or recipe.warmup is not None:
            raise ValueError("checkpoint.fork belongs to kinds rl and sft without a warmup")
        if fork.step is not None and recipe.max_steps is not None and fork.step >= recipe.max_steps:
            raise ValueError(
                f"checkpoint.fork.step {fork.step} must be below max_steps {recipe.max_steps}: steps count on"
            )
    if recipe.weights.transport != "filesystem" and recipe.kind == Kind.SFT:
        raise ValueError(
            f"weights.transport {recipe.weights.transport} belongs to kind rl: in kind sft no engine follows the trainer"
        )


def groups_can_be_compared(recipe: Recipe) -> None:
    size = recipe.rollouts.group_size
    if recipe.rollouts.batch_size % size:
        raise ValueError(
            f"rollouts.batch_size {recipe.rollouts.batch_size} must be a multiple of rollouts.group_size {size}"
        )
    if recipe.kind != Kind.RL:
        return
    compared = [kind for kind in recipe.algorithm_types if kind in COMPARED]
    if compared and size == 1:
        raise ValueError(
            f"rollouts.group_size 1 leaves algorithm {compared[0]} nothing to compare: every advantage would be 0"
        )


def sampling_fits(recipe: Recipe) -> None:
    after = recipe.after and recipe.after.evaluation
    has_rollouts = recipe.kind in (Kind.RL, Kind.EVAL) or after
    sampling = {"rollouts": recipe.rollouts.sampling} if has_rollouts else {}
    for key, split in (
        ("environments.eval", recipe.environments.eval if has_rollouts else ()),
        ("after.evaluation.environments", after.environments if after else ()),
    ):
        sampling |= {f"{key}.{at}": each.sampling for at, each in enumerate(split) if each.sampling}
    for key, each in sampling.items():
        if each.max_tokens >= recipe.max_model_len:
            raise ValueError(
                f"{key}.sampling.max_tokens {each.max_tokens} leaves no room for a prompt in "
                f"{recipe.max_model_len} tokens"
            )
    is_sampled = any(algorithm.samples_from == "policy" for algorithm in recipe.algorithms)
    if recipe.kind != Kind.RL or not is_sampled:
        return
    trained = recipe.rollouts.sampling
    if trained.temperature == 0:
        raise ValueError(
            "kind rl needs a rollouts.sampling.temperature above 0; an evaluation may have its own sampling"
        )
    if unknown := [name for name in trained.extra if name in UNKNOWN_TO_THE_TRAINER]:
        why = UNKNOWN_TO_THE_TRAINER[unknown[0]]
        raise ValueError(
            f"rollouts.sampling.extra may not set {unknown[0]} in kind rl: {why}; an evaluation may have its own sampling"
        )


def after_has_its_blocks(recipe: Recipe) -> None:
    if recipe.after is None:
        return
    if recipe.kind not in (Kind.RL, Kind.SFT):
        raise ValueError(f"after belongs to kinds rl and sft: a run of kind {recipe.kind} trains nothing")
    if recipe.after.export is not None and recipe.after.export.merge and recipe.lora is None:
        raise ValueError("after.export.merge is for recipes with lora: this one trains a whole model")
    export, evaluation = recipe.after.export, recipe.after.evaluation
    steps = [("export.step", export.step)] if export is not None and export.step != "last" else []
    if evaluation is not None and not isinstance(evaluation.steps, str):
        steps += [("evaluation.steps", step) for step in evaluation.steps]
    for key, step in steps:
        if step > recipe.steps:
            raise ValueError(f"after.{key} {step} is beyond max_steps {recipe.steps}")
    if evaluation is not None and not (evaluation.environments or recipe.environments.eval):
        raise ValueError("after.evaluation needs environments, its own or environments.eval")


def adapters_can_be_served(recipe: Recipe) -> None:
    if recipe.lora is None:
        return
    is_evaluation = recipe.evaluation is not None and recipe.evaluation.weights is not None
    if recipe.kind not in (Kind.RL, Kind.SFT) and not is_evaluation:
        raise ValueError(
            f"lora belongs to kinds rl and sft, and to evaluations of their weights: a run of kind {recipe.kind} "
            f"trains no adapters"
        )
    if recipe.kind == Kind.RL and recipe.lora.dropout:
        raise ValueError(
            "lora.dropout belongs to kind sft: in rl the trainer would judge tokens by a policy that no engine sampled"
        )
    is_served = recipe.kind != Kind.SFT or (recipe.after is not None and recipe.after.evaluation is not None)
    if is_served and recipe.lora.rank > MAX_SERVED_RANK:
        raise ValueError(
            f"lora.rank {recipe.lora.rank} is above {MAX_SERVED_RANK}, the most that vLLM serves"
        )
    if recipe.trainer.vision == "trained":
        raise ValueError("trainer.vision trained is for whole models: with lora, adapters alone are trained")
    if recipe.weights.transport != "filesystem":
        raise ValueError(
            f"weights.transport {recipe.weights.transport} is for whole models: with lora, versions are adapters and as small already"
        )
    if recipe.name == recipe.model.name:
        raise ValueError(
            f"name must differ from model.name with lora: engines serve the adapter as {recipe.name}"
        )


def tokens_can_be_carried(recipe: Recipe) -> None:
    if recipe.layout.trainer.expert_backend == "deepep" and recipe.trainer.param_dtype != "bfloat16":
        raise ValueError(
            f"layout.trainer.expert_backend deepep carries bfloat16 alone, and trainer.param_dtype is "
            f"{recipe.trainer.param_dtype}: set that to bfloat16, or expert_backend to torch"
        )


def routers_can_be_replayed(recipe: Recipe) -> None:
    if not recipe.trainer.router_replay:
        return
    if recipe.kind != Kind.RL:
        raise ValueError(f"trainer.router_replay belongs to kind rl: in kind {recipe.kind} no engine samples")
    if recipe.inference.kv_offload_gib is not None:
        raise ValueError(
            "trainer.router_replay and inference.kv_offload_gib exclude each other: of tokens whose KV blocks come "
            "back from the host, an engine may have forgotten the experts"
        )
    parts = recipe.trainer.activation_checkpointing
    alone = [] if isinstance(parts, str) else [each for each in parts if each.split(".")[-1] in ROUTERS]
    if alone:
        raise ValueError(
            f"trainer.router_replay and activation_checkpointing [{alone[0]}] exclude each other: name the whole "
            "mixture, as in [mlp]; a router that is recomputed alone chooses for itself"
        )


def teacher_is_there_where_it_is_needed(recipe: Recipe) -> None:
    if recipe.kind != Kind.RL:
        return  # no algorithm is at work
    needed = [kind for kind in recipe.algorithm_types if kind in NEED_TEACHER]
    if needed and recipe.teacher is None:
        raise ValueError(f"algorithm {needed[0]} needs a teacher")
    if recipe.teacher is not None and not needed:
        raise ValueError(f"a teacher is given and no algorithm uses it; {' and '.join(NEED_TEACHER)} do")
    scored = [kind for kind in recipe.algorithm_types if kind in SCORED]
    if scored and recipe.rollouts.sampling.temperature != 1:
        raise ValueError(
            f"algorithm {scored[0]} compares with log-probabilities of temperature 1, and "
            f"rollouts.sampling.temperature is {recipe.rollouts.sampling.temperature}"
        )


def judge_has_a_place(recipe: Recipe) -> None:
    if recipe.judge is not None and recipe.kind not in (Kind.RL, Kind.EVAL):
        raise ValueError(f"judge belongs to kinds rl and eval: a run of kind {recipe.kind} has no rollouts")
    if recipe.is_external and Role.JUDGE in recipe.served_models:
        raise ValueError("a run of evaluation.external starts no engines: give its judge a base_url")


def prefill_fits(recipe: Recipe) -> None:
    layout = recipe.layout.inference
    if layout.prefill is None:
        return
    if recipe.is_external:
        raise ValueError("layout.inference.prefill: a run of evaluation.external starts no engines")
    if recipe.lora is not None:
        raise ValueError("layout.inference.prefill is for whole models: leave out prefill or lora")
    if recipe.replays_routers:
        raise ValueError(
            "trainer.router_replay needs every token's experts of one engine, and those of prompts stay with "
            "the engine that layout.inference.prefill reads them in: leave out one of the two"
        )
    for key in ("kv_offload_gib", "recompute_kv_on_update"):
        if getattr(recipe.inference, key):
            raise ValueError(
                f"layout.inference.prefill hands KV blocks from engine to engine, which excludes inference.{key}"
            )
    sizes = {layout.accelerators_per_replica, layout.prefill.accelerators_per_replica}
    if recipe.weights.transport == "broadcast" and len(sizes) > 1:
        raise ValueError(
            "weights.transport broadcast seats engines of one size: give layout.inference.prefill as many "
            "accelerators as the engines that decode, or choose another transport"
        )
