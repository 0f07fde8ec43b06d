"""The keys of a new recipe, each with the comment that explains it.

entries = task_entries(request)                     # everything but the layout, which the planner chooses from them
entries = with_layout(request, entries, sized)      # layout, staleness, transport and memory options
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.interpreters import InterpreterError, ask
from primerl_hpc.common.model_families import family_of
from primerl_hpc.common.names import Kind
from primerl_hpc.launch.new_recipe.request import MAX_SEQ_LEN, RecipeRequest
from primerl_hpc.launch.new_recipe.sizing import Sized
from primerl_hpc.plan.assess.search import NEAR
from primerl_hpc.recipe.renderer import COMPARISON

GIB = 2**30


@dataclass(frozen=True)
class Entry:
    """A top-level key of the recipe."""

    key: str
    value: Any
    comments: tuple[str, ...] = ()
    """Paragraphs above the key."""


def task_entries(request: RecipeRequest, config: Mapping[str, Any]) -> list[Entry]:
    """Return the entries of the task: what is trained or evaluated, on what, with which settings.

    ``config``: content of the model's config.json.
    """
    is_cpu = not request.profile.profile.node.gpus
    entries = [
        Entry("kind", request.run_kind.value),
        Entry("name", request.recipe_name),
        _model(request, str(config.get("model_type")), is_cpu),
        Entry("seq_len", _seq_len(request, config), (_seq_len_comment(request),)),
    ]
    if request.run_kind != Kind.EVAL:
        entries.append(Entry("max_steps", request.max_steps))
    entries += {
        Kind.RL: _rl_entries,
        Kind.SFT: _sft_entries,
        Kind.EVAL: _evaluation_entries,
    }[request.run_kind](request, entries[3].value)
    if is_cpu:
        entries += _cpu_entries(request)
    return entries


def _model(request: RecipeRequest, family: str, is_cpu: bool) -> Entry:
    renderer = _fitting_renderer(request.model, family_of(family).renderer)
    value: dict[str, Any] = {"name": request.model}
    value |= {"dtype": "float32"} if is_cpu else {}
    value["renderer"] = {"name": renderer}
    comment = "The renderer converts messages to the model's tokens and back."
    if renderer == "auto":
        comment += (
            " auto looks it up by the model's hub name; a folder needs a name, such as qwen3 or chatml."
        )
    return Entry("model", value, (comment,))


def _fitting_renderer(model: str, renderer: str) -> str:
    """Return the family's ``renderer``, or the one of the chat template if a model folder has another tokenizer."""
    if renderer == "auto" or not Path(model).is_dir():
        return renderer
    block = {"name": str(Path(model).absolute()), "renderer": {"name": renderer}}
    try:
        ask(sys.executable, {}, COMPARISON, block)
    except ConfigError:
        return "default"
    except InterpreterError:  # the packages of an environment server are not installed here: submit checks it
        pass
    return renderer


def _seq_len(request: RecipeRequest, config: Mapping[str, Any]) -> int:
    if request.seq_len is not None:
        return request.seq_len
    most = config.get("max_position_embeddings")
    return min(MAX_SEQ_LEN, most) if isinstance(most, int) else MAX_SEQ_LEN


def _seq_len_comment(request: RecipeRequest) -> str:
    if request.run_kind == Kind.SFT:
        return "Tokens of one packed row; longer samples are cut."
    return "Tokens of a sample: prompt, replies and everything that the environment adds."


def _rl_entries(request: RecipeRequest, seq_len: int) -> list[Entry]:
    rollouts = {
        "batch_size": request.step_size,
        "group_size": request.group_size,
        "sampling": {"max_tokens": max(1, seq_len // 2)},
    }
    lr = 1e-5 if request.lora_rank is not None else 1e-6
    entries = [
        _environments(request),
        Entry(
            "rollouts",
            rollouts,
            (
                "A step trains on batch_size rollouts: batch_size / group_size tasks with group_size rollouts of each, "
                "whose rewards are compared. Larger groups find more tasks that are neither always solved nor never.",
                "sampling.max_tokens limits one reply. Predictions assume that rollouts use half of it on average; "
                "set expected.completion_tokens to a better value, or use plan --like RUN.",
            ),
        ),
        *_algorithm(request),
        *_lora(request),
        Entry("optimizer", {"lr": lr}),
        Entry("checkpoint", {"interval": 50}),
    ]
    return entries


def _environments(request: RecipeRequest) -> Entry:
    assert request.environment is not None
    args = {"args": request.environment_args} if request.environment_args else {}
    train = {"id": request.environment, **args}
    value: dict[str, Any] = {"train": [train]}
    if request.has_test_split:
        held_out = {"split": "test", **request.environment_args}
        value["eval"] = [
            {
                "id": request.environment,
                "name": "held-out",
                "args": held_out,
                "interval": 50,
                "num_tasks": 128,
            }
        ]
        return Entry("environments", value, ("held-out scores tasks that are not trained on.",))
    hint = (
        "To measure progress on tasks that are not trained on, add an environment under eval, for example: "
        "eval: [{id: ID, name: held-out, args: {split: test}, interval: 50}]."
    )
    return Entry("environments", value, (hint,))


def _algorithm(request: RecipeRequest) -> list[Entry]:
    if request.kind != "distillation":
        return []
    assert request.teacher is not None
    why = {
        "opd": "On-policy distillation: the policy samples, and the teacher scores every token. Both models need the "
        "same vocabulary.",
        "sft_distill": "Hard distillation: the teacher samples, and the policy is trained on its replies.",
    }[request.method]
    return [
        Entry("algorithm", {"type": request.method}, (why,)),
        Entry("teacher", {"model": {"name": request.teacher}}),
    ]


def _lora(request: RecipeRequest) -> list[Entry]:
    if request.lora_rank is None:
        return []
    value = {"rank": request.lora_rank, "alpha": 2 * request.lora_rank}
    return [Entry("lora", value, ("Adapters are trained; the model's own weights stay frozen.",))]


def _sft_entries(request: RecipeRequest, seq_len: int) -> list[Entry]:
    assert request.data is not None
    comment = (
        "Rows have the column messages, or prompt and completion. batch_size counts rows of seq_len tokens."
    )
    return [
        Entry("sft", {"data": {"path": request.data}, "batch_size": request.step_size}, (comment,)),
        *_lora(request),
        Entry("optimizer", {"lr": 1e-4 if request.lora_rank is not None else 2e-5}),
        Entry("scheduler", {"type": "cosine", "warmup_steps": min(10, max(1, request.max_steps // 10))}),
        Entry("checkpoint", {"interval": 50}),
    ]


def _evaluation_entries(request: RecipeRequest, seq_len: int) -> list[Entry]:
    assert request.environment is not None
    environment: dict[str, Any] = {"id": request.environment, "samples": 4}
    args = {"split": "test"} if request.has_test_split else {}
    args |= request.environment_args
    environment |= {"args": args} if args else {}
    return [
        Entry("environments", {"eval": [environment]}, ("samples is the k of avg@k and pass@k.",)),
        Entry("rollouts", {"sampling": {"max_tokens": max(1, seq_len // 2)}}),
    ]


def with_default_layout(request: RecipeRequest, entries: Sequence[Entry], reason: str) -> list[Entry]:
    """Return the entries with ``auto`` as layout, decided by fixed rules, and the reason why nothing is predicted."""
    kind = request.run_kind
    layout: dict[str, Any] = {"inference": {"nodes": "auto"}} if kind != Kind.SFT else {}
    layout |= {"trainer": {"nodes": "auto"}} if kind != Kind.EVAL else {}
    why = f"The layout is left to fixed rules, because nothing is predicted: {reason}."
    return [*entries, Entry("layout", layout, (why,))]


def _cpu_entries(request: RecipeRequest) -> list[Entry]:
    """Return layout and settings for a profile without GPUs, on which nothing is predicted."""
    kind = request.run_kind
    layout: dict[str, Any] = {"inference": {"replicas": 1}} if kind != Kind.SFT else {}
    layout |= {"trainer": {"ranks": 1}} if kind != Kind.EVAL else {}
    why = "One process of each role: nothing is predicted for a profile without GPUs."
    entries = [Entry("layout", layout, (why,))]
    if kind != Kind.SFT:
        entries.append(Entry("inference", {"kv_cache_gib": 0.5}))
    if kind != Kind.EVAL:
        entries.append(Entry("trainer", {"param_dtype": "float32", "activation_checkpointing": "none"}))
    return entries


# -- what the planner chooses ----------------------------------------------------------------------


def with_layout(request: RecipeRequest, entries: Sequence[Entry], sized: Sized) -> list[Entry]:
    """Return the entries with the chosen layout, each choice explained in a comment."""
    last = "max_steps" if request.run_kind != Kind.EVAL else "seq_len"
    found: list[Entry] = []
    for entry in entries:
        found.append(_settled(request, entry, sized))
        if entry.key == last:
            found += [_layout(request, sized), *_memory(sized)]
    if sized.transport != "filesystem":
        why = "The predicted step is shorter than with files: versions go from the trainer's memory to the engines'."
        found.append(Entry("weights", {"transport": sized.transport}, (why,)))
    return found


def _settled(request: RecipeRequest, entry: Entry, sized: Sized) -> Entry:
    """Return an entry of the task with the planner's numbers in it."""
    if entry.key == "rollouts" and request.run_kind == Kind.RL:
        return _rollouts(entry, sized)
    if entry.key == "teacher":
        layout = {"replicas": sized.teacher_engines, "tensor_parallel": sized.teacher_gpus}
        value = {**entry.value, "layout": layout}
        why = f"Each of its engines has the fewest GPUs that hold it: {sized.teacher_gpus}."
        return replace(entry, value=value, comments=(*entry.comments, why))
    return entry


def _layout(request: RecipeRequest, sized: Sized) -> Entry:
    choice, is_one_node = sized.choice, sized.space.nodes == 1
    value: dict[str, Any] = {}
    if choice.num_engines:
        engines: dict[str, Any] = (
            {"replicas": choice.num_engines} if is_one_node else {"nodes": choice.engine_nodes}
        )
        engines |= {"tensor_parallel": choice.tensor_parallel} if choice.tensor_parallel > 1 else {}
        engines |= {"data_parallel": choice.data_parallel} if choice.data_parallel > 1 else {}
        engines |= {"expert_parallel": True} if choice.expert_parallel else {}
        value["inference"] = engines
    if choice.trainer_ranks:
        ranks: dict[str, Any] = (
            {"ranks": choice.trainer_ranks} if is_one_node else {"nodes": choice.trainer_nodes}
        )
        ranks |= {"context_parallel": choice.context_parallel} if choice.context_parallel > 1 else {}
        ranks |= {"replicate": choice.replicate} if choice.replicate > 1 else {}
        value["trainer"] = ranks
    if choice.is_colocated:
        value["colocated"] = True
    return Entry("layout", value, tuple(_layout_comments(request, sized)))


def _layout_comments(request: RecipeRequest, sized: Sized) -> list[str]:
    prediction = sized.prediction
    where = f"{sized.gpus} GPUs of type {sized.gpu}"
    if sized.num_layouts > 1:
        found = (
            f"Chosen by prediction for {where}: the fastest of {sized.num_layouts} layouts, {sized.choice}."
        )
    elif request.run_kind == Kind.EVAL:
        found = f"Chosen for {where}: engines of the fewest GPUs that hold the model, {sized.choice}."
    else:
        found = f"Chosen for {where}: {sized.choice}."
    lines = [found]
    if sized.choice.is_colocated:
        lines = [
            f"The only layout for one GPU of type {sized.gpu}: engine and trainer take turns. With a second GPU "
            "they work at the same time."
        ]
    if (step := prediction.figures.get("time.step")) is not None:
        lines.append(f"Predicted step: about {step.value:.3g} s{_bottleneck(prediction.bottleneck)}.")
    memory = [
        f"{role} {prediction.figures[name].value / GIB:.1f} of {prediction.limits[name] / GIB:.1f} GiB"
        for role, name in (("trainer", "memory.trainer"), ("engine", "memory.engine"))
        if name in prediction.figures
    ]
    lines.append(f"Memory of a GPU: {', '.join(memory)}. A number may be replaced by auto.")
    return [" ".join(lines)]


def _bottleneck(side: str | None) -> str:
    words = {"engines": "the engines are", "trainer": "the trainer is"}
    return f"; {words[side]} the bottleneck" if side in words else ""


def _memory(sized: Sized) -> list[Entry]:
    choice = sized.choice
    if not choice.trainer_ranks:
        return []
    value: dict[str, Any] = {}
    reasons = []
    if choice.checkpointing == "none":
        value["activation_checkpointing"] = "none"
        reasons.append("All activations fit, so none is recomputed.")
    for name, what in (
        ("activation_offload", "inputs of blocks"),
        ("optimizer_offload", "the optimizer state"),
        ("cpu_offload", "master weights, gradients and the optimizer state"),
    ):
        if getattr(choice, name):
            value[name] = True
            reasons.append(f"To fit, {what} are in host memory.".replace("state are", "state is"))
    return [Entry("trainer", value, (" ".join(reasons),))] if value else []


def _rollouts(entry: Entry, sized: Sized) -> Entry:
    steps = sized.steps_by_staleness or {}
    value = {**entry.value, "max_off_policy_steps": sized.staleness}
    if sized.choice.max_in_flight:
        value["max_in_flight"] = sized.choice.max_in_flight
    predicted = ", ".join(f"{age}: {step:.3g} s" for age, step in steps.items())
    if sized.choice.is_colocated:
        why = "The engine sleeps while the trainer has the GPU, so rollouts of older policies would hide no time."
        return replace(entry, value=value, comments=(*entry.comments, why))
    why = f"max_off_policy_steps is the least whose predicted step is within {NEAR:.0%} of the fastest ({predicted})."
    return replace(entry, value=value, comments=(*entry.comments, why))
