"""Trace iterations of running engines through vLLM's own routes, ``/start_profile`` and ``/stop_profile``.

    engines = find_engines(run, ["inference-0"])         # also a role: all of its engines
    [trace] = trace_engines(run, engines, steps=20)
    trace.files, trace.iterations, trace.problem         # one file for each worker of the engine

The engines write into ``profiles/<engine>`` of the run directory and continue to serve, slower. An engine counts its
iterations in its metrics; one without requests has none, and its trace ends after `LIMIT_S`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx

from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.common.names import Role
from primerl_hpc.common.waiting import Polling
from primerl_hpc.observe.status.job_watcher import JobWatcher
from primerl_hpc.observe.status.snapshot import take_snapshot
from primerl_hpc.run.access.keys import OwnServer, own_server
from primerl_hpc.run.access.ownership import check_may_change
from primerl_hpc.run.endpoints import read_endpoints
from primerl_hpc.run.rundir import RunDir

ENGINE_ROLES = (Role.INFERENCE, Role.PREFILL, Role.TEACHER, Role.JUDGE)
LIMIT_S = 60.0
"""Time limit for the iterations of a trace."""
LATE = 2
"""Iterations that an engine may have run before its profiler started and counts afterward."""
POLL_S = 0.05
ANSWER_S = 300.0
"""Time limit of a request: an engine writes its trace before it responds."""
_ITERATIONS = re.compile(r"^vllm:iteration_tokens_total_count(?:\{([^}]*)\})? ([\d.e+]+)$", re.MULTILINE)


@dataclass(frozen=True)
class EngineTrace:
    engine: str
    files: list[Path]
    iterations: int
    problem: str = ""
    """Why the trace is missing or short; empty if it is complete."""


def find_engines(run: RunDir, wanted: Sequence[str]) -> dict[str, OwnServer]:
    """Return the engines that ``wanted`` names, as processes or roles.

    Raises NotFoundError for a name without a running engine, DataError for one without keys, OccupiedError for another
    user's run.
    """
    check_may_change(run, hint="only its owner can trace it")
    running = [name for role in ENGINE_ROLES for name in read_endpoints(run, role)]
    chosen = {}
    for word in wanted:
        named = [name for name in running if word in (name, name.rpartition("-")[0])]
        matching = {name: server for name in named if (server := own_server(run, name)) is not None}
        if not matching:
            state = take_snapshot(run, JobWatcher().facts_of([run])).state.value
            hint = f"its engines: {', '.join(running)}" if running else f"primerl-hpc status {_quoted(run)}"
            raise NotFoundError(f"this run is {state} and has no running engine '{word}'", hint=hint)
        chosen |= matching
    return chosen


def trace_engines(run: RunDir, engines: dict[str, OwnServer], *, steps: int) -> list[EngineTrace]:
    """Trace at least ``steps`` iterations of each engine, of all engines at the same time."""
    with ThreadPoolExecutor(max(1, len(engines))) as pool:
        tasks = [pool.submit(_trace, run, name, engines[name], steps) for name in sorted(engines)]
        return [task.result() for task in tasks]


def _trace(run: RunDir, name: str, engine: OwnServer, steps: int) -> EngineTrace:
    folder, count = run.engine_traces(name), 0
    before = set(_traces_in(folder))
    try:
        with engine.client(httpx.Timeout(ANSWER_S, connect=10.0)) as client:
            client.post("/start_profile").raise_for_status()
            try:
                # iterations before the start of the profiler are in no trace
                start = _iterations(client)
                count = max(0, _wait(client, start, steps + LATE) - LATE)
            finally:
                client.post("/stop_profile").raise_for_status()
    except (httpx.HTTPError, OSError) as error:
        return EngineTrace(name, _new(folder, before), count, _explain(error))
    files = _new(folder, before)
    problem = "" if files else f"it wrote no trace into {folder}; see its log"
    if count < steps:
        problem = problem or f"it ran {count} of {steps} iterations in {LIMIT_S:.0f} s: it had no requests"
    return EngineTrace(name, files, count, problem)


def _wait(client: httpx.Client, start: dict[str, float], steps: int) -> int:
    """Return the iterations since ``start``, as soon as they are ``steps``, or at the time limit."""
    polling = Polling(LIMIT_S, POLL_S)
    return polling.last(lambda: count_since(start, _iterations(client)), lambda count: count >= steps)


def count_since(start: dict[str, float], now: dict[str, float]) -> int:
    """Return the iterations of the data-parallel rank that ran most of them."""
    return int(max((value - start.get(rank, 0.0) for rank, value in now.items()), default=0))


def _iterations(client: httpx.Client) -> dict[str, float]:
    """Return the iterations so far, by labels of the data-parallel rank."""
    return read_iterations(client.get("/metrics").raise_for_status().text)


def read_iterations(metrics: str) -> dict[str, float]:
    return {labels or "": float(value) for labels, value in _ITERATIONS.findall(metrics)}


def _traces_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.pt.trace.json*"))


def _new(folder: Path, before: set[Path]) -> list[Path]:
    return [path for path in _traces_in(folder) if path not in before]


def _explain(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == 404:
        return "it was started without vLLM's profiler (inference.extra_args, or an earlier version)"
    return f"{type(error).__name__}: {error}"


def _quoted(run: RunDir) -> str:
    return shlex.quote(run.root.name)
