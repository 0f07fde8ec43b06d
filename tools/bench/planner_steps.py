"""Published end-to-end steps as cases of the planner: NeMo-RL's on-policy rows. Used by planner_rows.py.

Their engines and trainer share all GPUs in turns (`layout.colocated`). Taken from the row: model, GPUs, degrees, batch,
mean and longest rollout. From the software: two forward passes for the log-probabilities of the policy and of the
reference, and weights that stay on the GPU, so that an update costs nothing. Assumed: a prompt of 150 tokens, and a
coefficient of variation of the lengths of 0.5; a step differs by 1 % between 0.3 and 0.8, because the longest rollouts
are truncated. Pipeline parallelism is predicted as FSDP.

Not predicted, of 27 rows: 8 asynchronous rows of NeMo-RL, whose split of the GPUs is not published, one of them with
environments of unknown speed; 6 of verl 7B and 30B and 3 of AReaL without lengths of rollouts; 3 of verl without a GPU
type, and one with a changing split; one of SkyRL without a layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from planner_times import Case as Row

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.plan.assess.case import make_case
from primerl_hpc.plan.assess.choice import LayoutChoice
from primerl_hpc.plan.assess.prediction import predict
from primerl_hpc.plan.predict.figure import Figure
from primerl_hpc.plan.predict.shape import known_shape
from primerl_hpc.recipe.load import parse_recipe

MODELS = {
    "Qwen3-235B": "Qwen/Qwen3-235B-A22B",
    "Qwen3-30B3A": "Qwen/Qwen3-30B-A3B",
    "DeepSeek V3": "deepseek-ai/DeepSeek-V3",
}
GPUS = {"H100": ("H100-SXM", 8), "GB200 NVL72": ("GB200", 4)}
PROMPT, CV = 150, 0.5
LOGPROB_PASSES, STEP_PASSES = 2.0, 4.0
"""Passes of the size of forward: of the log-probabilities, and of a training step with recomputation."""


def step_rows(rows: Iterable[Mapping[str, str]]) -> Iterator[Row]:
    """Yield a case for each on-policy row of NeMo-RL."""
    for row in rows:
        if row["kind"] == "rl_step" and row["mode"] == "GRPO On policy":
            degrees = [int(word) for word in re.findall(r"\d+", row["layout"])]
            group = "with pipeline parallelism" if degrees[5] > 1 else "without pipeline parallelism"
            yield Row(row["id"], "step", group, float(row["step_s"]), step_of(row, degrees), is_fitted=False)


def step_of(row: Mapping[str, str], degrees: list[int]) -> Figure:
    """Return the predicted step. ``degrees``: generation TP, PP; training TP, CP, EP, PP."""
    (gpu, per_node), ranks = GPUS[row["hardware"]], int(row["gpus"])
    engine, _, tensor, context, expert = degrees[:5]
    longest = int(row["seq_in"].replace(",", ""))
    recipe = parse_recipe(
        {
            "kind": "rl",
            "name": "published",
            "model": {"name": MODELS[row["model"]]},
            "seq_len": longest,
            "max_steps": 1,
            "environments": {"train": [{"id": "reverse-text"}]},
            "layout": {"colocated": True, "trainer": {"ranks": ranks}},
            "rollouts": {
                "batch_size": int(
                    re.findall(r"G-GBS ([\d,]+)", row["batch"])[0].rstrip(",").replace(",", "")
                ),
                "group_size": 32,
                "max_off_policy_steps": 0,
                "async_level": 0,
                "sampling": {"max_tokens": longest - 1},
                "expected": {"completion_tokens": int(row["seq_out"]), "prompt_tokens": PROMPT, "cv": CV},
            },
        }
    )
    overrides = [f"nodes={ranks // per_node}", f"node.gpus={per_node}", f"node.gpu={gpu}"]
    case = make_case(
        recipe, load_profile("h100x64", overrides=overrides).profile, known_shape(recipe.model.name)
    )
    choice = LayoutChoice(
        num_engines=ranks // engine,
        tensor_parallel=engine,
        data_parallel=1,
        expert_parallel=False,
        trainer_ranks=ranks,
        ranks_per_node=per_node,
        context_parallel=context,
        trainer_tensor_parallel=tensor,
        trainer_expert_parallel=expert,
        max_in_flight=recipe.rollouts.batch_size,
        engine_nodes=ranks // per_node,
        trainer_nodes=ranks // per_node,
        is_colocated=True,
    )
    figures = predict(case, choice).figures
    step, more = figures["time.step"], LOGPROB_PASSES / STEP_PASSES * figures["time.trainer.step"].value
    value = step.value - figures["time.weight_update"].value + more
    low, high = (value * end / step.value for end in (step.low, step.high))
    return replace(step, value=value, low=low, high=high)
