"""Convert a configuration of prime-rl (``rl.toml``) to a recipe: what `primerl-hpc import-config` does.

    found = convert(read_toml([Path("rl.toml")]), name="rl")
    found.values, found.unknown, found.elsewhere      # the recipe, keys without a counterpart, keys of other places

Pure except for `read_toml`. prime-rl has one setting at up to four places (``seq_len``, ``trainer.model.seq_len``, …):
the first one in `MOVED` that is set counts, and a different value at another place is reported.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import ConfigError, NotFoundError

SAMPLING = {
    "temperature": "temperature",
    "max_completion_tokens": "max_tokens",
    "max_tokens": "max_tokens",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
}
WANDB = ("wandb", "monitors.wandb", "orchestrator.wandb", "orchestrator.monitors.wandb")
PLATFORM = ("orchestrator.prime_monitor", "prime_monitor", "orchestrator.monitors.prime", "monitors.prime")
"""Tables of W&B and of the Prime platform, in several versions of prime-rl."""
MOVED: dict[str, str] = {
    "max_steps": "max_steps",
    "seq_len": "seq_len",
    "trainer.model.seq_len": "seq_len",
    "orchestrator.seq_len": "seq_len",
    "trainer.max_steps": "max_steps",
    "orchestrator.max_steps": "max_steps",
    "seed": "seed",
    "model.name": "model.name",
    "trainer.model.name": "model.name",
    "orchestrator.model.name": "model.name",
    "inference.model.name": "model.name",
    "inference.vllm.model": "model.name",
    "tokenizer.name": "model.tokenizer",
    "model.trust_remote_code": "model.trust_remote_code",
    "trainer.model.trust_remote_code": "model.trust_remote_code",
    "tokenizer.trust_remote_code": "model.trust_remote_code",
    "trainer.model.attn": "model.attention",
    "orchestrator.renderer.name": "model.renderer.name",
    "orchestrator.batch_size": "rollouts.batch_size",
    "orchestrator.token_batch_size": "rollouts.batch_tokens",
    "orchestrator.group_size": "rollouts.group_size",
    "orchestrator.rollouts_per_example": "rollouts.group_size",
    "orchestrator.max_off_policy_steps": "rollouts.max_off_policy_steps",
    "orchestrator.max_async_level": "rollouts.async_level",
    "max_async_level": "rollouts.async_level",
    "orchestrator.concurrency.max_inflight": "rollouts.max_in_flight",
    "orchestrator.max_inflight_rollouts": "rollouts.max_in_flight",
    **{f"orchestrator.train.sampling.{key}": f"rollouts.sampling.{own}" for key, own in SAMPLING.items()},
    **{f"orchestrator.sampling.{key}": f"rollouts.sampling.{own}" for key, own in SAMPLING.items()},
    "orchestrator.algo.type": "algorithm.type",
    "trainer.loss.adv_tau": "loss.adv_tau",
    "trainer.loss.kl_tau": "loss.kl_tau",
    "trainer.loss.dppo_mask_low": "loss.mask_low",
    "trainer.loss.dppo_mask_high": "loss.mask_high",
    "trainer.loss.import_path": "loss.import_path",
    "trainer.loss.kwargs": "loss.kwargs",
    **{
        f"trainer.optim.{key}": f"optimizer.{key}"
        for key in ("type", "lr", "weight_decay", "max_norm", "momentum", "nesterov", "eps")
    },
    **{f"trainer.scheduler.{key}": f"scheduler.{key}" for key in ("type", "warmup_steps", "decay_steps")},
    **{f"trainer.model.lora.{key}": f"lora.{key}" for key in ("rank", "alpha", "dropout", "target_modules")},
    "trainer.model.ac.freq": "trainer.activation_checkpointing_every",
    "trainer.model.reshard_after_forward": "trainer.reshard_after_forward",
    "trainer.model.reduce_dtype": "trainer.reduce_dtype",
    "trainer.model.fsdp_cpu_offload": "trainer.cpu_offload",
    "trainer.model.optim_cpu_offload": "trainer.optimizer_offload",
    "trainer.model.fused_lm_head_token_chunk_size": "trainer.head_chunk_tokens",
    "trainer.enable_router_replay": "trainer.router_replay",
    "trainer.gc.interval": "trainer.gc_interval",
    "trainer.model.dp_replicate": "layout.trainer.replicate",
    "trainer.model.cp": "layout.trainer.context_parallel",
    "trainer.model.cp_style": "layout.trainer.context_style",
    "trainer.model.ep": "layout.trainer.expert_parallel",
    "trainer.model.ep_comm_backend": "layout.trainer.expert_backend",
    "deployment.num_train_gpus": "layout.trainer.ranks",
    "deployment.num_train_nodes": "layout.trainer.nodes",
    "deployment.num_infer_nodes": "layout.inference.nodes",
    "inference.vllm.tensor_parallel_size": "layout.inference.tensor_parallel",
    "inference.parallel.tp": "layout.inference.tensor_parallel",
    "inference.vllm.data_parallel_size": "layout.inference.data_parallel",
    "inference.parallel.dp": "layout.inference.data_parallel",
    "inference.vllm.enable_expert_parallel": "layout.inference.expert_parallel",
    **{
        f"{place}.{key}": f"inference.{key}"
        for place in ("inference.vllm", "inference.model", "inference")
        for key in ("max_model_len", "gpu_memory_utilization", "enforce_eager")
    },
    **{
        f"{place}.{key}": f"checkpoint.{key}"
        for place in ("ckpt", "trainer.ckpt")
        for key in ("interval", "keep_last", "keep_interval")
    },
    **{
        f"{place}.{key}": f"tracking.wandb.{key}"
        for place in WANDB
        for key in ("project", "entity", "name", "group", "tags", "offline")
    },
    **{
        f"{place}.{key}": f"tracking.prime.{own}"
        for place in PLATFORM
        for key, own in (
            ("run_name", "run_name"),
            ("name", "run_name"),
            ("team_id", "team_id"),
            ("base_url", "base_url"),
            ("api_key_var", "key_variable"),
        )
    },
    **{
        f"{place}.log_extras.{key}": f"{own}.log_extras.{key}"
        for places, own in ((WANDB, "tracking.wandb"), (PLATFORM, "tracking.prime"))
        for place in places
        for key in ("samples", "distributions", "interval", "sample_ratio")
    },
    "log.level": "log.level",
    "log.json_logging": "log.json",
    "orchestrator.log.vf_level": "log.verifiers",
    "env_vars": "env",
    "trainer.env_vars": "env_by_role.trainer",
    "orchestrator.env_vars": "env_by_role.orchestrator",
    "inference.env_vars": "env_by_role.inference",
    "run.name": "name",
}
"""Key of prime-rl → key of the recipe with the same meaning. Later places of a setting are older or derived ones."""
ELSEWHERE = {
    "output_dir": "--run-dir of submit",
    "run.dir": "--run-dir of submit",
    "clean": "--overwrite of submit",
    "dry_run": "--dry-run of submit",
    "resume": "primerl-hpc resume",
    "slurm": "the cluster profile",
    "deployment": "the cluster profile (nodes, GPUs per node) and layout",
    "rollout_transport": "nothing: batches are files of the run directory",
    "orchestrator.env_server_base_port": "nothing: ports are chosen when processes start",
    "trainer.dist_timeout_seconds": "timeouts.trainer_hang_s, the time of one micro-batch",
    "inference.server": "nothing: ports are chosen when processes start",
}
"""Keys whose meaning is not part of a recipe, each with the keys below it → where it is set."""
ENVIRONMENT_LISTS = {
    "train": ("orchestrator.train.env", "orchestrator.train.source", "orchestrator.env"),
    "eval": ("orchestrator.eval.env", "orchestrator.eval.source", "eval.env", "eval.source"),
}
TABLES: dict[str, tuple[str, Any]] = {
    "ckpt": ("checkpoint.at_end", True),
    "trainer.model.compile": ("trainer.compile", True),
    "trainer.model.ac_offloading": ("trainer.activation_offload", True),
    **{place: ("tracking.wandb", {}) for place in WANDB},
    **{place: ("tracking.prime", {}) for place in PLATFORM},
}
"""Tables that set something by being present, also without keys."""
LOSSES = {"default": "dppo", "ipo": "ipo", "custom": "custom"}
PLAIN_HARNESSES = ("null", "default")


@dataclass
class Conversion:
    values: dict[str, Any] = field(default_factory=dict)
    """The recipe as in YAML."""
    unknown: list[str] = field(default_factory=list)
    """Keys without a counterpart."""
    elsewhere: dict[str, str] = field(default_factory=dict)
    """Keys that are set elsewhere → where."""
    origins: dict[str, str] = field(default_factory=dict)
    """Key of the recipe → the key of prime-rl that it comes from."""
    conflicts: list[str] = field(default_factory=list)
    """Sentences about settings with different values at two places."""

    def put(self, key: str, value: Any, origin: str) -> None:
        """Set a key of the recipe unless an earlier place has set it."""
        *parents, last = key.split(".")
        block = self.values
        for parent in parents:
            block = block.setdefault(parent, {})
        if key not in self.origins:
            block[last], self.origins[key] = value, origin
        elif block[last] != value:
            self.conflicts.append(f"{origin} = {value!r} differs from {self.origins[key]} = {block[last]!r}")


def read_toml(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the merged tables of TOML files; later files take precedence. Raises ConfigError, NotFoundError."""
    merged: dict[str, Any] = {}
    for path in paths:
        try:
            merged = _merge(merged, tomllib.loads(path.read_text()))
        except FileNotFoundError:
            raise NotFoundError("there is no such file", location=str(path)) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"is not valid TOML: {error}", location=str(path)) from None
    return merged


def _merge(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: _merge(low[key], high[key])
        for key in low.keys() & high.keys()
        if _are_tables(low[key], high[key])
    }
    return low | high | both


def _are_tables(*values: Any) -> bool:
    return all(isinstance(value, dict) for value in values)


def convert(tables: dict[str, Any], *, name: str) -> Conversion:
    """Return the recipe for a configuration. ``name``: the recipe's name if the configuration has none.

    Raises ConfigError if it does not configure reinforcement learning.
    """
    if "orchestrator" not in tables:
        raise ConfigError(
            "has no table [orchestrator], so it is not an rl.toml of prime-rl",
            hint="only configurations of `rl` are converted; for SFT: primerl-hpc new my.yaml --kind sft",
        )
    found = Conversion({"kind": "rl", "name": name})
    leaves = dict(_leaves(tables))
    for key, own in MOVED.items():
        if key in leaves:
            found.put(own, leaves.pop(key), key)
    for key, (own, value) in TABLES.items():
        if _at(tables, key) is not None and own not in found.values.get("tracking", {}):
            _put_table(found, key, own, value)
    for split, places in ENVIRONMENT_LISTS.items():
        for place in places:
            if isinstance(entries := leaves.pop(place, None), list):
                _environments(found, split, place, entries, leaves)
    for key, change in SPECIAL.items():
        if key in leaves:
            change(found, leaves.pop(key), leaves)
    for key, value in leaves.items():
        where = next((text for prefix, text in ELSEWHERE.items() if _is_below(key, prefix)), None)
        if where is not None:
            found.elsewhere[key] = where
        elif key.startswith("inference.vllm."):
            found.put(f"inference.extra_args.{key.removeprefix('inference.vllm.')}", value, key)
        else:
            found.unknown.append(key)
    return found


def _is_below(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(f"{prefix}.")


def _leaves(tables: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value); the values of `MOVED` may be tables."""
    for name, value in tables.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in MOVED:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _at(tables: dict[str, Any], key: str) -> Any:
    value: Any = tables
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _put_table(found: Conversion, key: str, own: str, value: Any) -> None:
    *parents, last = own.split(".")
    block = found.values
    for parent in parents:
        block = block.setdefault(parent, {})
    block.setdefault(last, value)


# -- environments ----------------------------------------------------------------------------------


def _environments(
    found: Conversion, split: str, place: str, entries: list[dict[str, Any]], leaves: dict[str, Any]
) -> None:
    converted = []
    for index, entry in enumerate(entries):
        rest = (
            _merge(dict(entry.pop("env", {})), entry) if isinstance(entry.get("env"), dict) else dict(entry)
        )
        taskset = rest.pop("taskset", None) or {"id": rest.pop("id", None), **rest.pop("args", {})}
        args = {key: value for key, value in taskset.items() if key != "id"}
        values: dict[str, Any] = {"id": taskset.get("id") or rest.get("name")}
        if (label := rest.pop("name", None)) not in (None, values["id"]):
            values["name"] = label
        values |= {"args": args} if args else {}
        if agent := _agent(rest):
            values["env_args"] = {"agent": agent}
        values |= _split_keys(split, rest, leaves)
        converted.append(values)
        found.unknown += [f"{place}[{index}].{key}" for key in rest]
    found.values.setdefault("environments", {})[split] = converted


def _agent(rest: dict[str, Any]) -> dict[str, Any]:
    """Return harness and runtime of an environment, without those that recipes have anyway."""
    harness = rest.pop("harness", None) or {}
    runtime = harness.pop("runtime", None)
    agent = {} if harness.get("id") in (None, *PLAIN_HARNESSES) else {"harness": harness}
    return agent if runtime in (None, {"type": "subprocess"}) else {**agent, "runtime": runtime}


def _split_keys(split: str, rest: dict[str, Any], leaves: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that only training or only evaluation has; settings of all evaluations apply to each."""
    if split == "train":
        return {"ratio": rest.pop("ratio")} if "ratio" in rest else {}
    values = {}
    for key, own in (
        ("interval", "interval"),
        ("group_size", "samples"),
        ("rollouts_per_example", "samples"),
        ("num_examples", "num_tasks"),
    ):
        value = rest.pop(key, leaves.get(f"orchestrator.eval.{key}", leaves.get(f"eval.{key}")))
        if value is not None and value != -1:
            values[own] = value
    sampling = rest.pop("sampling", {})
    shared = {key: leaves.get(f"orchestrator.eval.sampling.{key}") for key in SAMPLING}
    chosen = {SAMPLING[key]: value for key, value in {**shared, **sampling}.items() if value is not None}
    return {**values, "sampling": chosen} if chosen else values


# -- settings that are not only moved -------------------------------------------------------------


def _loss(found: Conversion, value: Any, leaves: dict[str, Any]) -> None:
    found.put("loss.type", LOSSES.get(value, value), "trainer.loss.type")


def _betas(found: Conversion, value: Any, leaves: dict[str, Any]) -> None:
    found.put("optimizer.betas", [value, leaves.pop("trainer.optim.betas2", 0.999)], "trainer.optim.betas1")


def _min_lr(found: Conversion, value: Any, leaves: dict[str, Any]) -> None:
    lr = found.values.get("optimizer", {}).get("lr", 1e-6)
    found.put("scheduler.min_lr_ratio", value / lr, "trainer.scheduler.min_lr")


def _transport(found: Conversion, value: Any, leaves: dict[str, Any]) -> None:
    has_adapters = "lora" in found.values  # prime-rl sends adapters by files as well
    transport = {"nccl": "filesystem" if has_adapters else "broadcast", "filesystem": "filesystem"}.get(value)
    if transport is None:
        found.unknown.append(f"weight_broadcast.type = {value}")
    else:
        found.put("weights.transport", transport, "weight_broadcast.type")


def _zero_advantages(found: Conversion, value: Any, leaves: dict[str, Any]) -> None:
    found.put(
        "rollouts.zero_advantage", "drop" if value else "keep", "orchestrator.train.filter_zero_advantages"
    )


def _engines(found: Conversion, value: Any, leaves: dict[str, Any]) -> None:
    layout = found.values.setdefault("layout", {}).setdefault("inference", {})
    size = layout.get("tensor_parallel", 1) * layout.get("data_parallel", 1)
    found.put("layout.inference.replicas", max(1, value // size), "deployment.num_infer_gpus")


def _checkpointing(found: Conversion, value: Any, leaves: dict[str, Any]) -> None:
    if value == "full":
        found.put("trainer.activation_checkpointing", "full", "trainer.model.ac.mode")
    else:
        found.unknown.append(f"trainer.model.ac.mode = {value}")


def _used(found: Conversion, value: Any, leaves: dict[str, Any]) -> None:
    """A setting of all evaluations, which `_split_keys` has read."""


def _fp8(found: Conversion, value: Any, _: dict[str, Any]) -> None:
    found.put("trainer.fp8", {"fp8": "blockwise"}.get(value, value), "trainer.model.quantization.type")


SPECIAL: dict[str, Callable[[Conversion, Any, dict[str, Any]], None]] = {
    "trainer.loss.type": _loss,
    "trainer.optim.betas1": _betas,
    "trainer.scheduler.min_lr": _min_lr,
    "weight_broadcast.type": _transport,
    "orchestrator.train.filter_zero_advantages": _zero_advantages,
    "deployment.num_infer_gpus": _engines,
    "trainer.model.ac.mode": _checkpointing,
    "trainer.model.quantization.type": _fp8,
    **{
        f"{place}.{key}": _used
        for place in ("orchestrator.eval", "eval")
        for key in ("interval", "group_size", "rollouts_per_example", "num_examples")
    },
    **{f"orchestrator.eval.sampling.{key}": _used for key in SAMPLING},
}
