"""Tries an environment out: is it installed, has it tasks, does one rollout end in a reward?

    report = check_environment(environment)                                        # loads it and its tasks
    report = check_environment(environment, url="http://…/v1", model="qwen3")      # and runs one task there

The model is asked by chat completions, so any OpenAI-compatible server will do; it is also the judge, where a reward
asks one that names no server. Runs in this process, without a run.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

from primerl_hpc.common.errors import DataError
from primerl_hpc.envs.judges import appoint, client_of, homeless_judges
from primerl_hpc.envs.tasks import load_tasks, resolve_environment
from primerl_hpc.recipe.rollout_schema import Environment

LOOK_AT_TASKS = 1000


@dataclass
class CheckReport:
    environment: str
    num_tasks: int
    has_more: bool
    """There are more tasks than were looked at."""
    agents: list[str]
    first_task: str
    needs_judge: bool
    """A reward asks a judge that names no server: the recipe has to have a ``judge``."""
    rollout: dict[str, Any] | None = None
    """Of the first task: rewards and turns by agent, stop condition, messages; None when no server was given."""
    warnings: list[str] = field(default_factory=list)


def check_environment(
    environment: Environment,
    *,
    url: str | None = None,
    model: str = "",
    key_variable: str = "OPENAI_API_KEY",
    max_tokens: int = 512,
    timeout_s: float = 120.0,
) -> CheckReport:
    """Raises ConfigError and DataError as `load_tasks`, and DataError when the rollout failed or gave no reward."""
    from verifiers.v1.configs.agent import agent_config_fields

    tasks = load_tasks(environment, LOOK_AT_TASKS + 1)
    config = resolve_environment(environment)
    report = CheckReport(
        environment.label,
        min(len(tasks), LOOK_AT_TASKS),
        len(tasks) > LOOK_AT_TASKS,
        list(agent_config_fields(config)),
        tasks[0].key,
        needs_judge=bool(homeless_judges(config)),
    )
    if report.needs_judge:
        report.warnings.append(
            "a reward asks a judge: give the recipe one, judge: {model: {name: …}}"
            + ("" if url is None else f" (here {model} judged itself)")
        )
    if url is not None:
        report.rollout = asyncio.run(
            _one_rollout(environment, tasks[0].data, url, model, key_variable, max_tokens, timeout_s)
        )
        if all(not any(trace["rewards"].values()) for trace in report.rollout["traces"]):
            report.warnings.append(
                "every reward is 0: fine for a weak model, else look at the reply and the reward"
            )
    return report


async def _one_rollout(
    environment: Environment,
    data: dict[str, Any],
    url: str,
    model: str,
    key_variable: str,
    max_tokens: int,
    timeout_s: float,
) -> dict[str, Any]:
    import verifiers.v1 as vf
    from verifiers.v1.configs.client import EvalClientConfig
    from verifiers.v1.types import SamplingConfig

    config = resolve_environment(environment)
    appoint(homeless_judges(config), client_of(url, model, key_variable))
    env = vf.load_environment(config)
    task_type = type(env.taskset).task_type()
    task = task_type(task_type.data_type().model_validate(data), env.taskset.config.task)
    context = vf.ModelContext(
        model=model,
        client=EvalClientConfig(base_url=url, api_key_var=key_variable),
        sampling=SamplingConfig(max_tokens=max_tokens),
    )
    place = f"environment {environment.label}, task {task.key}"
    try:
        async with asyncio.timeout(timeout_s), env.serving():
            episode = await env.run_slot(env.slots(task)[0], context)
    except TimeoutError:
        raise DataError(
            f"no end after {timeout_s:.0f} s", place=place, mend="raise --timeout, or set max_turns"
        ) from None
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or not episode.traces:
        last = errors[-1] if errors else None
        raise DataError(
            f"{last.type}: {last.message}" if last else "the rollout failed without a reason", place=place
        )
    return {"traces": [_trace(trace, place) for trace in episode.traces]}


def _trace(trace: Any, place: str) -> dict[str, Any]:
    rewards = {name: None if reward is None else reward.value for name, reward in trace.rewards.items()}
    bad = [name for name, value in rewards.items() if value is None or not math.isfinite(value)]
    if bad or not rewards:
        raise DataError(f"agent {trace.agent.name} got no {', '.join(bad) or 'reward'}", place=place)
    return {
        "agent": trace.agent.name,
        "turns": trace.num_turns,
        "stop": trace.stop_condition,
        "rewards": rewards,
        "messages": [{"role": each.role, "content": _text(each)} for each in trace.messages],
    }


def _text(message: Any) -> str:
    if calls := getattr(message, "tool_calls", None):
        return " ".join(f"{call.name}({call.arguments})" for call in calls)
    return message.content if isinstance(message.content, str) else str(message.content or "")
