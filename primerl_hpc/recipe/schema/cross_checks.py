"""Cross checks: blocks of a recipe that need or exclude one another.

`check_recipe` runs every check on a recipe whose blocks are valid by themselves; ``recipe/load.py`` calls it for every
recipe that it builds, and `plan.plan.load_plan` for every recipe of a plan. A check raises ValueError with a message
that names the keys, the problem and the remedy; the caller adds the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from primerl_hpc.common.names import Kind, Role
from primerl_hpc.recipe.sampling_rules import REFUSED_ENGINE_OPTIONS, flat_parameters, refused_parameter
from primerl_hpc.recipe.schema.layout import colocation_conflicts
from primerl_hpc.recipe.schema.model import MAX_SERVED_RANK
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.rollout import Sampling
from primerl_hpc.recipe.schema.training import ABSORBED

ROUTER_MODULES = ("gate", "router")
"""Module names of the routers of mixture-of-experts models, over all families."""
ENGINE_MAX_TOKENS = 16
"""vLLM's default for max_tokens; vLLM refuses a request without max_tokens whose min_tokens is larger."""
DEPRECATED_FP8, ONLINE_FP8 = "fp8", "fp8_per_tensor"
"""vLLM 0.31's old and new name for quantization to FP8 while a model is loaded."""


def deprecation_warnings(recipe: Recipe) -> list[str]:
    """Return a sentence for each setting that is accepted and should be written differently."""
    blocks = {"inference": recipe.inference}
    blocks |= {f"{role.value}.inference": model.inference for role, model in recipe.served_models.items()}
    return [
        f"{location}.extra_args: vLLM 0.31 deprecates quantization '{DEPRECATED_FP8}' for a model that is not stored "
        f"in FP8. Engines of such a model get '{ONLINE_FP8}', which is the same; "
        f"write {{quantization: {ONLINE_FP8}}} instead."
        for location, inference in blocks.items()
        if inference.quantization == DEPRECATED_FP8
    ]


def check_recipe(recipe: Recipe) -> None:
    """Run every check. Raises ValueError for the first that fails."""
    for check in (
        check_kind,
        check_fork,
        check_transport,
        check_evaluation,
        check_groups,
        check_sampling,
        check_after,
        check_adapters,
        check_expert_dtype,
        check_router_replay,
        check_teacher,
        check_judge,
        check_prefill,
        check_colocated,
    ):
        check(recipe)


def check_kind(recipe: Recipe) -> None:
    """Check that each kind has the blocks that it needs, and none that belong to other kinds."""
    if recipe.kind in (Kind.RL, Kind.SFT) and recipe.max_steps is None:
        raise ValueError(f"kind {recipe.kind} needs max_steps")
    if recipe.kind == Kind.RL and not recipe.environments.train:
        raise ValueError("kind rl needs at least one environment in environments.train")
    if recipe.kind == Kind.EVAL and not recipe.environments.eval:
        raise ValueError("kind eval needs at least one environment in environments.eval")
    if recipe.kind == Kind.SFT and recipe.sft is None:
        raise ValueError("kind sft needs an sft block")
    if recipe.warmup is not None and recipe.kind != Kind.RL:
        raise ValueError(f"warmup belongs to kind rl, but the kind is {recipe.kind}; remove warmup")


def check_fork(recipe: Recipe) -> None:
    """Check that only a training run without a warm-up starts from a checkpoint of another run."""
    if recipe.warmup is not None and recipe.warmup.checkpoint.fork is not None:
        raise ValueError("warmup.checkpoint.fork: a warm-up starts from the model; remove fork or warmup")
    fork = recipe.checkpoint.fork
    if fork is None:
        return
    if recipe.kind not in (Kind.RL, Kind.SFT) or recipe.warmup is not None:
        raise ValueError(
            "checkpoint.fork belongs to kinds rl and sft without a warmup; remove fork or warmup"
        )
    if fork.step is not None and recipe.max_steps is not None and fork.step >= recipe.max_steps:
        raise ValueError(
            f"checkpoint.fork.step {fork.step} must be less than max_steps {recipe.max_steps}: a forked run continues "
            "the step count"
        )


def check_transport(recipe: Recipe) -> None:
    """Check that a run of kind sft writes its weights to files."""
    if recipe.weights.transport != "filesystem" and recipe.kind == Kind.SFT:
        raise ValueError(
            f"weights.transport {recipe.weights.transport} belongs to kind rl: in kind sft no engines receive weights "
            "during training; use filesystem"
        )


def check_evaluation(recipe: Recipe) -> None:
    """Check that the block ``evaluation`` has the keys of the recipe's kind."""
    evaluation = recipe.evaluation
    if evaluation is None:
        return
    if recipe.kind not in (Kind.EVAL, Kind.SFT):
        raise ValueError(
            f"evaluation belongs to kinds eval and sft, but the kind is {recipe.kind}; in kind rl, set the interval of "
            "each environment in environments.eval, and use after.evaluation to evaluate when training is done"
        )
    if recipe.kind == Kind.EVAL:
        if evaluation.weights is None and evaluation.is_of_versions:
            raise ValueError(
                "evaluation: steps, every and watch select versions in the folder weights, but weights is not set"
            )
        if evaluation.weights is None and not evaluation.base:
            raise ValueError(
                "evaluation: there is nothing to evaluate without weights and with base: false; set one of them"
            )
        return
    for key in ("weights", "external", "watch"):
        if getattr(evaluation, key):
            raise ValueError(
                f"evaluation.{key} belongs to kind eval: a run of kind sft evaluates its own weights; remove it"
            )
    if evaluation.steps == "all" and "every" not in evaluation.model_fields_set:
        raise ValueError(
            "evaluation needs every (the number of steps between two evaluations) or steps in kind sft"
        )
    if not recipe.environments.eval:
        raise ValueError("evaluation needs environments.eval in kind sft")
    if evaluation.steps != "all" and max(evaluation.steps) > recipe.steps:
        raise ValueError(f"evaluation.steps {max(evaluation.steps)} is greater than max_steps {recipe.steps}")


def check_groups(recipe: Recipe) -> None:
    """Check that batches hold complete groups, and that groups are large enough for the algorithm."""
    size = recipe.rollouts.group_size
    if recipe.rollouts.batch_size % size:
        raise ValueError(
            f"rollouts.batch_size {recipe.rollouts.batch_size} must be a multiple of rollouts.group_size {size}"
        )
    if recipe.kind != Kind.RL:
        return
    compared = [algorithm.type for algorithm in recipe.algorithms if algorithm.compares_group]
    if compared and size == 1:
        raise ValueError(
            f"rollouts.group_size 1: algorithm {compared[0]} compares the rollouts of a group, so every advantage "
            "would be 0; increase group_size or choose another algorithm"
        )


def check_sampling(recipe: Recipe) -> None:
    """Check that prompts fit into the context, and that engines sample the distribution that the trainer computes."""
    for key, sampling in _all_sampling(recipe).items():
        _check_lengths(key, sampling, recipe.max_model_len)
    if recipe.kind == Kind.RL and any(algorithm.samples_from == "policy" for algorithm in recipe.algorithms):
        _check_training_sampling(recipe)


def _all_sampling(recipe: Recipe) -> dict[str, Sampling]:
    """Return every sampling block that the run uses, by the key that holds it."""
    after = recipe.after.evaluation if recipe.after is not None else None
    if not (recipe.kind in (Kind.RL, Kind.EVAL) or recipe.is_evaluated_online or after is not None):
        return {}
    found = {"rollouts": recipe.rollouts.sampling}
    for key, environments in (
        ("environments.eval", recipe.environments.eval),
        ("after.evaluation.environments", after.environments if after is not None else ()),
    ):
        for index, environment in enumerate(environments):
            if environment.sampling is not None:
                found[f"{key}.{index}"] = environment.sampling
    return found


def _check_lengths(key: str, sampling: Sampling, max_model_len: int) -> None:
    if sampling.max_tokens is not None and sampling.max_tokens >= max_model_len:
        raise ValueError(
            f"{key}.sampling.max_tokens {sampling.max_tokens} leaves no room for a prompt in a context of "
            f"{max_model_len} tokens; reduce max_tokens, or increase seq_len or inference.max_model_len"
        )
    min_tokens = sampling.extra.get("min_tokens")
    if sampling.max_tokens is None and isinstance(min_tokens, int) and min_tokens > ENGINE_MAX_TOKENS:
        raise ValueError(
            f"{key}.sampling.extra.min_tokens {min_tokens} needs a max_tokens: without max_tokens, engines refuse "
            f"a min_tokens greater than {ENGINE_MAX_TOKENS}"
        )


def _check_training_sampling(recipe: Recipe) -> None:
    trained = recipe.rollouts.sampling
    if trained.temperature == 0:
        raise ValueError(
            "kind rl needs a rollouts.sampling.temperature above 0; an evaluation may have its own sampling"
        )
    fields = trained.model_dump(exclude={"extra"})
    for location, parameters in (("rollouts.sampling", fields), ("rollouts.sampling.extra", trained.extra)):
        if refused := refused_parameter(parameters):
            raise ValueError(_refusal(f"{location} may not set {refused[0]}", refused[1]))
    for index, environment in enumerate(recipe.environments.train):
        if recipe.algorithms[index].samples_from == "policy":
            _check_agent_sampling(environment.env_args, f"environments.train.{index}", trained.temperature)
    for name in recipe.inference.extra_args:
        if (option := name.lstrip("-").replace("_", "-")) in REFUSED_ENGINE_OPTIONS:
            raise ValueError(
                f"inference.extra_args may not set '{option}' in kind rl: it changes the distribution from which "
                "engines sample, but the trainer computes the model's own; remove it"
            )


def _check_agent_sampling(env_args: Mapping[str, Any], location: str, temperature: float) -> None:
    """Check ``env_args.agent.sampling``, which is merged over the sampling of training rollouts.

    Whether agents with other names are trained is only known when they play; the orchestrator checks those
    (`orchestrator.rollouts.agent_sampling.refuse_other_sampling`).
    """
    agent = env_args.get("agent")
    if not isinstance(agent, Mapping) or agent.get("client") or agent.get("model"):
        return  # another model plays the agent, or it is not configured
    sampling = agent.get("sampling")
    if not isinstance(sampling, Mapping):
        return  # the agent has no sampling of its own
    refused = other_sampling(flat_parameters(sampling), temperature)
    if refused is not None:
        raise ValueError(_refusal(f"{location}.env_args.agent.sampling may not set {refused[0]}", refused[1]))


def other_sampling(parameters: Mapping[str, Any], temperature: float) -> tuple[str, str] | None:
    """Return the parameter that makes an agent sample from another distribution than the trainer computes, and why.

    Returns None if there is no such parameter.
    """
    own = parameters.get("temperature", temperature)
    # Engines sample at temperature 1 if a request has none.
    if (1.0 if own is None else own) != temperature:
        return "temperature", f"the trainer computes with rollouts.sampling.temperature {temperature:g}"
    return refused_parameter(parameters)


def _refusal(what: str, reason: str) -> str:
    return f"{what} in kind rl: {reason}; an evaluation may have its own sampling"


def check_after(recipe: Recipe) -> None:
    """Check that follow-up jobs belong to a training run and use steps that it has."""
    if recipe.after is None:
        return
    if recipe.kind not in (Kind.RL, Kind.SFT):
        raise ValueError(
            f"after belongs to kinds rl and sft: a run of kind {recipe.kind} does not train; remove after"
        )
    export, evaluation = recipe.after.export, recipe.after.evaluation
    if export is not None and export.merge and recipe.lora is None:
        raise ValueError(
            "after.export.merge is for recipes with lora, but this one trains all weights; remove merge"
        )
    steps = [("export.step", export.step)] if export is not None and export.step != "last" else []
    if evaluation is not None and not isinstance(evaluation.steps, str):
        steps += [("evaluation.steps", step) for step in evaluation.steps]
    for key, step in steps:
        if step > recipe.steps:
            raise ValueError(f"after.{key} {step} is greater than max_steps {recipe.steps}")
    if evaluation is not None and not (evaluation.environments or recipe.environments.eval):
        raise ValueError("after.evaluation needs environments: set its own, or environments.eval")


def check_adapters(recipe: Recipe) -> None:
    """Check that the run can train the adapters of ``lora``, and that vLLM can serve them and `max_adapters` more."""
    if recipe.inference.num_adapters and recipe.lora is None and recipe.kind != Kind.INFERENCE:
        raise ValueError(
            "inference.adapter_dirs and max_adapters belong to kind inference and to runs with lora: engines whose "
            "complete weights are replaced in place serve no adapters"
        )
    if recipe.lora is None:
        return
    is_evaluation = recipe.evaluation is not None and recipe.evaluation.weights is not None
    if recipe.kind not in (Kind.RL, Kind.SFT) and not is_evaluation:
        raise ValueError(
            f"lora belongs to kinds rl and sft, and to evaluations of their weights: a run of kind "
            f"{recipe.kind} trains no adapters; remove lora"
        )
    if recipe.kind == Kind.RL and recipe.lora.dropout:
        raise ValueError(
            "lora.dropout belongs to kind sft: in kind rl the trainer's policy would differ from the one that engines "
            "sample from; remove it"
        )
    is_served = recipe.has_engines or (recipe.after is not None and recipe.after.evaluation is not None)
    if is_served and recipe.lora.rank > MAX_SERVED_RANK:
        raise ValueError(
            f"lora.rank {recipe.lora.rank} exceeds {MAX_SERVED_RANK}, the maximum that vLLM serves"
        )
    if is_served and any(name.split(".")[-1] == ABSORBED for name in recipe.lora.target_modules):
        raise ValueError(
            f"lora.target_modules may not contain {ABSORBED} if engines serve the adapters: vLLM absorbs it into other "
            "matrices when it loads the model and ignores its adapters"
        )
    if key := recipe.trainer.full_training_key:
        raise ValueError(f"trainer.{key} is for full training; remove it, or lora, which trains adapters")
    if recipe.weights.transport != "filesystem":
        raise ValueError(
            f"weights.transport {recipe.weights.transport} is for full training: with lora, versions "
            "are adapters, which are small; use filesystem"
        )
    if recipe.name == recipe.model.name:
        raise ValueError(
            f"name must differ from model.name with lora: engines serve the adapter under the name {recipe.name}"
        )


def check_expert_dtype(recipe: Recipe) -> None:
    """Check that the expert backend supports the trainer's data type."""
    if recipe.layout.trainer.expert_backend == "deepep" and recipe.trainer.param_dtype != "bfloat16":
        raise ValueError(
            "layout.trainer.expert_backend deepep supports bfloat16 only, but trainer.param_dtype is "
            f"{recipe.trainer.param_dtype}; set param_dtype to bfloat16 or expert_backend to torch"
        )


def check_router_replay(recipe: Recipe) -> None:
    """Check that engines can return the experts of every token, and that the trainer can use them."""
    if not recipe.trainer.router_replay:
        return
    if recipe.kind != Kind.RL:
        raise ValueError(
            f"trainer.router_replay belongs to kind rl: in kind {recipe.kind} no engines sample; remove it"
        )
    if recipe.inference.kv_offload_gib is not None:
        raise ValueError(
            "trainer.router_replay and inference.kv_offload_gib cannot be combined: vLLM loses routed-expert data for "
            "offloaded KV blocks; remove one of them"
        )
    parts = recipe.trainer.activation_checkpointing
    routers = (
        [] if isinstance(parts, str) else [name for name in parts if name.split(".")[-1] in ROUTER_MODULES]
    )
    if routers:
        raise ValueError(
            f"trainer.router_replay and activation_checkpointing [{routers[0]}] cannot be combined: a router that is "
            "recomputed by itself chooses its own experts; name the complete mixture, as in [mlp]"
        )


def check_teacher(recipe: Recipe) -> None:
    """Check that there is a teacher if and only if an algorithm uses it, and that tokens are scored at temperature
    1."""
    if recipe.kind != Kind.RL:
        return  # other kinds run no algorithm
    needed = [algorithm.type for algorithm in recipe.algorithms if algorithm.needs_teacher]
    if needed and recipe.teacher is None:
        raise ValueError(f"algorithm {needed[0]} needs a teacher; add the block teacher")
    if recipe.teacher is not None and not needed:
        raise ValueError(
            "there is a teacher, but no algorithm uses it; remove teacher, or use algorithm opd or sft_distill"
        )
    scored = [algorithm.type for algorithm in recipe.algorithms if algorithm.is_scored]
    if scored and recipe.rollouts.sampling.temperature != 1:
        raise ValueError(
            f"algorithm {scored[0]} compares log-probabilities at temperature 1, but rollouts.sampling.temperature is "
            f"{recipe.rollouts.sampling.temperature}; set it to 1"
        )


def check_judge(recipe: Recipe) -> None:
    """Check that a judge belongs to a run with rollouts, and has engines or a URL."""
    has_rollouts = recipe.kind in (Kind.RL, Kind.EVAL) or recipe.is_evaluated_online
    if recipe.judge is not None and not has_rollouts:
        raise ValueError(
            f"judge belongs to kinds rl and eval: a run of kind {recipe.kind} has no rollouts; remove judge"
        )
    if recipe.is_external and Role.JUDGE in recipe.served_models:
        raise ValueError(
            "a run with evaluation.external starts no engines, so it cannot serve its judge; set judge.base_url"
        )


def check_prefill(recipe: Recipe) -> None:
    """Check that prefill engines are compatible with the other features of the run."""
    layout = recipe.layout.inference
    if layout.prefill is None:
        return
    if recipe.is_external:
        raise ValueError(
            "layout.inference.prefill: a run with evaluation.external starts no engines; remove prefill"
        )
    if recipe.lora is not None or recipe.inference.num_adapters:
        key = "lora" if recipe.lora is not None else "inference.adapter_dirs"
        raise ValueError(f"layout.inference.prefill does not support adapters; remove prefill or {key}")
    if recipe.replays_routers:
        raise ValueError(
            "trainer.router_replay and layout.inference.prefill cannot be combined: the experts of prompt tokens stay "
            "with the engine that processes the prompt; remove one of them"
        )
    for key in ("kv_offload_gib", "recompute_kv_on_update"):
        if getattr(recipe.inference, key):
            raise ValueError(
                f"layout.inference.prefill and inference.{key} cannot be combined: prefill engines hand their "
                "KV blocks to other engines; remove one of them"
            )
    prefill = layout.prefill
    degrees = (layout.tensor_parallel, layout.data_parallel, prefill.tensor_parallel, prefill.data_parallel)
    sizes = set()
    if "auto" not in degrees:
        sizes = {layout.accelerators_per_replica, prefill.accelerators_per_replica}
    if recipe.weights.transport == "broadcast" and len(sizes) > 1:
        raise ValueError(
            "weights.transport broadcast needs engines of the same size: give layout.inference.prefill as many "
            "accelerators as the decoding engines, or choose another transport"
        )


def check_colocated(recipe: Recipe) -> None:
    """Check that engines and trainer can share accelerators."""
    if recipe.layout.colocated is not None and (reason := next(colocation_conflicts(recipe), None)):
        raise ValueError(reason)
