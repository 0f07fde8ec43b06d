"""Processes that an environment starts for each episode, and how many episodes a node can therefore run at a time.

    processes_of(config)            # ["tool server EchoTools"]: one process for each episode
    warning_of(environment, processes, cores)

verifiers starts the tool servers of ``Task.toolsets`` (a ``vf.ToolsetConfig`` in its scaffold) for each episode, as
Python processes whose imports take seconds of CPU time; agents may run programs or containers. 256 episodes in flight
mean at least 256 processes. Tool servers of ``Taskset.toolsets`` (``vf.SharedToolsetConfig``) run once per environment
server.
"""

from __future__ import annotations

import os
from typing import Any

from primerl_hpc.envs.tools import toolsets_of_each_episode
from primerl_hpc.recipe.schema.rollout import Environment

TOOL_SERVER = "tool server"
_STOCK_HARNESSES = "verifiers.v1.harnesses"


def processes_of(config: Any) -> list[str]:
    """Return the names of the processes that each episode starts on this node. ``config``: verifiers' EnvConfig.

    Empty if episodes run only inside the environment server.
    """
    from verifiers.v1.configs.agent import agent_config_fields

    agents = agent_config_fields(config)
    found = [f"{TOOL_SERVER} {toolset.server_name}" for toolset in _own_servers(config, agents)]
    for name, agent in agents.items():
        if (program := _program_of(agent)) is not None:
            found.append(f"{program} of agent {name}")
    return found


def _own_servers(config: Any, agents: dict[str, Any]) -> list[Any]:
    from verifiers.v1.runtimes import runtime_is_local

    are_agents_here = any(runtime_is_local(agent.runtime) for agent in agents.values())
    return [
        toolset
        for toolset in toolsets_of_each_episode(config)
        if not toolset.config.url  # with a URL it is an external server
        and (
            are_agents_here
            if getattr(toolset.config, "colocated", False)
            else runtime_is_local(toolset.config.runtime)
        )
    ]


def _program_of(agent: Any) -> str | None:
    """Return the container or program on this node that runs the agent; None if it runs inside the server."""
    from verifiers.v1.runtimes import runtime_is_local
    from verifiers.v1.utils.loaders import harness_class

    if not runtime_is_local(agent.runtime):
        return None
    if agent.runtime.type != "subprocess":
        return f"{agent.runtime.type} container"
    if agent.harness is None:
        return None
    harness = harness_class(agent.harness.id)
    # verifiers' own harnesses start a program for each episode; other harnesses do if they execute code
    if not harness.__module__.startswith(_STOCK_HARNESSES) and not harness.EXECUTES_CODE:
        return None
    return f"program of harness {agent.harness.id}"


def cores_here() -> int:
    """Return the number of CPU cores that this process and its children may use."""
    return len(os.sched_getaffinity(0))


def warning_of(environment: Environment, processes: list[str], cores: int) -> str:
    """Return a warning with the number of processes per episode, the limit of episodes, and how to need fewer."""
    number = f"{len(processes)} process{'es' if len(processes) > 1 else ''}"
    if environment.max_concurrent is None:
        bound = (
            f"at most {cores} episodes run at a time, the number of cores of this node; set the environment's "
            f"max_concurrent for another limit"
        )
    else:
        bound = f"max_concurrent allows {environment.max_concurrent} episodes at a time on {cores} cores"
    share = (
        ". To share one tool server among all episodes, give it a vf.SharedToolsetConfig and return it from "
        "Taskset.toolsets (docs/environments.md)"
        if any(name.startswith(TOOL_SERVER) for name in processes)
        else ""
    )
    return f"environment {environment.label} starts {number} for each episode ({', '.join(processes)}): {bound}{share}"
