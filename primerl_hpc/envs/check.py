"""Check an environment without a run: is it installed, does it have tasks, does one rollout produce a reward?

    report = check_environment(environment)                                        # loads it and its tasks
    report = check_environment(environment, url="http://…/v1", model="qwen3")      # also runs one task

The rollout runs in this process and uses chat completions, so any OpenAI-compatible server works. The same model serves
as the judge for rewards with a judge that has no server.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

from primerl_hpc.common.errors import DataError
from primerl_hpc.envs.judges import assign_client, client_of, judges_without_endpoint, neutralize_requests
from primerl_hpc.envs.processes import cores_here, processes_of, warning_of
from primerl_hpc.envs.tasks import load_tasks, location_of, resolve_environment
from primerl_hpc.recipe.schema.rollout import Environment

MAX_TASKS = 1000
"""Number of tasks that a check loads."""


@dataclass
class CheckReport:
    """Result of `check_environment`."""

    environment: str
    num_tasks: int
    has_more: bool
    """True if the environment has more tasks than were loaded."""
    agents: list[str]
    first_task: str
    location: str
    """File that defines the environment."""
    needs_judge: bool
    """True if a reward uses a judge without a server: the recipe must set ``judge``."""
    rollout: dict[str, Any] | None = None
    """Rollout of the first task: rewards, turns, stop condition and messages of each agent; None without a server."""
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
    """Load the environment and its tasks, and run the first task if ``url`` is given.

    Raises ConfigError and DataError as `load_tasks`, and DataError if the rollout fails or produces no reward.
    """
    tasks = load_tasks(environment, MAX_TASKS + 1)  # before verifiers is imported here: it defers imports
    from verifiers.v1.configs.agent import agent_config_fields

    config = resolve_environment(environment)
    processes = processes_of(config)
    report = CheckReport(
        environment.label,
        min(len(tasks), MAX_TASKS),
        len(tasks) > MAX_TASKS,
        list(agent_config_fields(config)),
        tasks[0].key,
        location_of(environment),
        needs_judge=bool(judges_without_endpoint(config)),
    )
    if report.needs_judge:
        report.warnings.append(
            "a reward uses a judge: set judge: {model: {name: …}} in the recipe"
            + ("" if url is None else f" (in this check {model} is its own judge)")
        )
    if processes:
        report.warnings.append(warning_of(environment, processes, cores_here()))
    if url is not None:
        report.rollout = asyncio.run(
            _one_rollout(environment, tasks[0].data, url, model, key_variable, max_tokens, timeout_s)
        )
        if all(not any(trace["rewards"].values()) for trace in report.rollout["traces"]):
            report.warnings.append(
                "every reward is 0: this is normal for a weak model; otherwise check the reply and the reward function"
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
    assign_client(judges_without_endpoint(config), client_of(url, model, key_variable))
    neutralize_requests()
    env = vf.load_environment(config)
    task_type = type(env.taskset).task_type()
    task = task_type(task_type.data_type().model_validate(data), env.taskset.config.task)
    context = vf.ModelContext(
        model=model,
        client=EvalClientConfig(base_url=url, api_key_var=key_variable),
        sampling=SamplingConfig(max_tokens=max_tokens),
    )
    location = f"environment {environment.label}, task {task.key}"
    try:
        async with asyncio.timeout(timeout_s), env.serving():
            episode = await env.run_slot(env.slots(task)[0], context)
    except TimeoutError:
        raise DataError(
            f"the rollout did not finish within {timeout_s:.0f} s",
            location=location,
            hint="increase --timeout, or set max_turns",
        ) from None
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or not episode.traces:
        last = errors[-1] if errors else None
        raise DataError(
            f"{last.type}: {last.message}" if last else "the rollout failed without an error message",
            location=location,
        )
    return {"traces": [_trace(trace, location) for trace in episode.traces]}


def _trace(trace: Any, location: str) -> dict[str, Any]:
    rewards = {name: None if reward is None else reward.value for name, reward in trace.rewards.items()}
    bad = [name for name, value in rewards.items() if value is None or not math.isfinite(value)]
    if bad or not rewards:
        raise DataError(
            f"agent {trace.agent.name} has no finite {', '.join(bad) or 'reward'}", location=location
        )
    return {
        "agent": trace.agent.name,
        "turns": trace.num_turns,
        "stop": trace.stop_condition,
        "rewards": rewards,
        "messages": [{"role": message.role, "content": _text(message)} for message in trace.messages],
    }


def _text(message: Any) -> str:
    if calls := getattr(message, "tool_calls", None):
        return " ".join(f"{call.name}({call.arguments})" for call in calls)
    return message.content if isinstance(message.content, str) else str(message.content or "")
