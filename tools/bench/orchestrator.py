#!/usr/bin/env python3
"""Measure the orchestrator with a mock engine of fixed latency: rollouts/s, CPU time per rollout, and event loop lag.

    tools/tiny-model outputs/tiny && tools/bench/orchestrator.py --model outputs/tiny/model
    tools/bench/orchestrator.py --model outputs/tiny/model --in-flight 256 --turns 3 --json

Environment servers, dispatcher, scoring, batches and packing are real; only the engine is a mock. ``cpu ms`` is the CPU
time of this process per finished rollout, ``verifiers ms`` that of verifiers' own client alone with the same number of
requests, ``lag p99`` the delay with which a sleep of 10 ms returns. Rollouts/s are bounded by the environment servers
(10 ms of CPU per turn), so more cores and ``--servers`` increase them. The measurement starts when as many rollouts
have finished as are in flight, or after ``--warm-up``; ``warm`` is the number of rollouts finished by then.

Required: with single turns, at most 2 ms more than verifiers' own client; with 1,024 in flight, a lag of at most 50 ms.
Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from machine import is_met, show  # noqa: E402

from primerl_hpc.cluster.load import load_profile  # noqa: E402
from primerl_hpc.common import env  # noqa: E402
from primerl_hpc.common.files import write_json  # noqa: E402
from primerl_hpc.common.names import MAIN_PHASE, Role, process_name  # noqa: E402
from primerl_hpc.common.waiting import wait_until  # noqa: E402
from primerl_hpc.orchestrator.batches.batcher import BatchBuilder  # noqa: E402
from primerl_hpc.orchestrator.driver import RolloutDriver  # noqa: E402
from primerl_hpc.orchestrator.evaluation import Evaluator  # noqa: E402
from primerl_hpc.orchestrator.event_loop import loop_factory  # noqa: E402
from primerl_hpc.orchestrator.rollout_data import Split  # noqa: E402
from primerl_hpc.orchestrator.rollouts.env_client import sampling_config, train_client  # noqa: E402
from primerl_hpc.orchestrator.rollouts.runner import RolloutRunner  # noqa: E402
from primerl_hpc.orchestrator.scheduling.dispatcher import Dispatcher, DispatchLimits  # noqa: E402
from primerl_hpc.orchestrator.scheduling.sampler import TaskSampler  # noqa: E402
from primerl_hpc.orchestrator.scoring.scoring import Scorer  # noqa: E402
from primerl_hpc.orchestrator.setup import RouterAddress, load_environments  # noqa: E402
from primerl_hpc.plan.planner import compile_plan  # noqa: E402
from primerl_hpc.recipe.load import parse_recipe  # noqa: E402
from primerl_hpc.recipe.schema.recipe import Recipe  # noqa: E402
from primerl_hpc.run.access.keys import run_keys  # noqa: E402
from primerl_hpc.run.endpoints import read_endpoint  # noqa: E402
from primerl_hpc.run.rundir import RunDir  # noqa: E402

TOKENS = [*range(40, 51), 2]  # of each reply; 2 is the end token
LAG_INTERVAL_S = 0.01
OWN_MS, LAG_MS, LAG_IN_FLIGHT = 2.0, 50.0, 1024  # required figures


# -- the mock engine, in its own process -----------------------------------------------------------


def serve_mock(latency_s: float, ready: Path) -> None:
    """Serve vLLM's token route with a fixed latency until SIGTERM. Writes its port to ``ready``."""
    from aiohttp import web

    content = [{"token": f"token_id:{token}", "logprob": -0.5} for token in TOKENS]
    choice = {"index": 0, "token_ids": TOKENS, "finish_reason": "stop", "logprobs": {"content": content}}

    async def generate(_: web.Request) -> web.Response:
        await asyncio.sleep(latency_s)
        return web.json_response({"request_id": "r", "choices": [choice]})

    async def models(_: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 512}]}
        )

    async def main() -> None:
        app = web.Application()
        app.add_routes([web.post("/inference/v1/generate", generate), web.get("/v1/models", models)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=8192)
        await site.start()
        port = runner.addresses[0][1]
        ready.with_suffix(".new").write_text(str(port))
        ready.with_suffix(".new").rename(ready)
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await stop.wait()

    asyncio.run(main())


# -- measurement -----------------------------------------------------------------------------------


class Meter:
    """Measures CPU time, finished rollouts and lags between `start` and `result`."""

    def __init__(self) -> None:
        self.finished, self._lags = 0, []

    def start(self) -> None:
        self.finished, self._lags = 0, []
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    async def watch(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(LAG_INTERVAL_S)
            self._lags.append(time.perf_counter() - before - LAG_INTERVAL_S)

    def result(self) -> dict[str, float | None]:
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        lags = sorted(self._lags)
        return {
            "rollouts_per_s": self.finished / wall,
            "cpu_ms": 1e3 * cpu / self.finished if self.finished else None,
            "lag_p99_ms": 1e3 * lags[int(0.99 * (len(lags) - 1))] if lags else 0.0,
        }


def make_recipe(model: Path, in_flight: int, turns: int, servers: int) -> Recipe:
    one = (
        {"id": "reverse-text"}
        if turns == 1
        else {"id": "alphabet-sort", "args": {"turns": turns, "names_per_turn": 1}}
    )
    return parse_recipe(
        {
            "kind": "rl",
            "name": "bench",
            "model": {"name": str(model.resolve()), "renderer": {"name": "chatml"}},
            "seq_len": 512,
            "max_steps": 1_000_000,
            "environments": {"train": [{**one, "name": f"env{index}"} for index in range(servers)]},
            "rollouts": {
                "batch_size": max(64, in_flight // 4),
                "group_size": 8,
                "max_in_flight": in_flight,
                "max_off_policy_steps": 1000,
                "zero_advantage": "keep",
                "max_error_fraction": 0.01,
                "sampling": {"max_tokens": 16},
            },
        }
    )


async def drive(
    run: RunDir, recipe: Recipe, url: str, seconds: float, warm_up_s: float
) -> dict[str, float | None]:
    """The orchestrator's loop without a trainer: a version is live as soon as its batch is packed."""
    envs = await load_environments(run, recipe)
    handles = envs[Split.TRAIN]
    for handle in handles:
        await handle.client.wait_ready(timeout_s=300)
    rollouts = recipe.rollouts
    sampler = TaskSampler([len(handle.tasks) for handle in handles], [1.0] * len(handles), 0)
    dispatcher = Dispatcher(
        next_task=sampler.next,
        limits=DispatchLimits(
            group_size=rollouts.group_size,
            batch_size=rollouts.batch_size,
            max_in_flight=rollouts.in_flight_ceiling,
            max_off_policy_steps=rollouts.max_off_policy_steps,
        ),
        last_step=recipe.steps,
    )
    labels = [handle.environment.label for handle in handles]
    builder = BatchBuilder(rollouts, Scorer(recipe), seq_len=recipe.seq_len, num_ranks=2, env_names=labels)
    router = RouterAddress(run, url)
    runner = RolloutRunner(
        recipe, envs, live_version=lambda: dispatcher.version, router_url=lambda: router.url
    )
    evaluator = Evaluator(recipe.environments, [], recipe.steps, set())
    driver = RolloutDriver(run, recipe, dispatcher, evaluator, runner, router)
    meter = Meter()
    watch = asyncio.create_task(meter.watch())

    async def until(deadline: float, finished: int | None = None) -> None:
        """Wait until that many rollouts have finished, or until the deadline."""
        while time.perf_counter() < deadline and (finished is None or meter.finished < finished):
            driver.dispatch(builder.num_queued)
            for group in await driver.next_groups():
                builder.add(group)
                meter.finished += len(group.results)
            if builder.is_ready(dispatcher.min_fresh_version):
                cut = builder.next_batch(dispatcher.step, dispatcher.min_fresh_version)
                await asyncio.to_thread(builder.pack, cut)
                driver.cancel(dispatcher.advance(dispatcher.step + 1))
                dispatcher.policy_live(dispatcher.step - 1)
                await asyncio.to_thread(driver.flush)

    meter.start()
    in_flight = rollouts.in_flight_ceiling
    await until(time.perf_counter() + warm_up_s, in_flight)  # all slots are in use
    warm = min(1.0, meter.finished / in_flight)
    meter.start()
    await until(time.perf_counter() + seconds)
    result = meter.result()
    watch.cancel()
    plain = await drive_verifiers(run, recipe, handles, url, in_flight, seconds, warm_up_s)
    await runner.close()
    return result | {"warm": warm, "verifiers_ms": plain}


async def drive_verifiers(
    run: RunDir,
    recipe: Recipe,
    handles: list[Any],
    url: str,
    in_flight: int,
    seconds: float,
    warm_up_s: float,
) -> float:
    """Return CPU ms per rollout of verifiers' client alone, with the same number of requests in flight."""
    from primerl_hpc.envs.curve import curve_client

    config = train_client(recipe.model, url)
    sampling = sampling_config(recipe.rollouts.sampling, 0)
    keys = run_keys(run).curve("env_server")
    clients = [curve_client(read_endpoint(run, handle.client.process)["url"], keys) for handle in handles]
    meter = Meter()
    is_over = False

    async def worker(number: int) -> None:
        which = number % len(handles)
        tasks = handles[which].tasks
        while not is_over:
            await clients[which].run(
                client=config,
                model=recipe.model.name,
                sampling=sampling,
                task_data=tasks[number % len(tasks)].data,
            )
            meter.finished += 1

    watch = asyncio.create_task(meter.watch())  # costs the same CPU time in both measurements
    meter.start()
    workers = [asyncio.create_task(worker(number)) for number in range(in_flight)]
    deadline = time.perf_counter() + warm_up_s
    while meter.finished < in_flight and time.perf_counter() < deadline:
        await asyncio.sleep(0.1)
    meter.start()
    await asyncio.sleep(seconds)
    result = meter.result()
    is_over = True
    for each in (watch, *workers):
        each.cancel()
    await asyncio.gather(watch, *workers, return_exceptions=True)
    for client in clients:
        await client.close()
    return result["cpu_ms"]


# -- processes -------------------------------------------------------------------------------------


def start(words: list[str], log: Path, **more: str) -> subprocess.Popen:
    with log.open("w") as file:
        return subprocess.Popen(
            [sys.executable, *words],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more},
        )


def measure(options: argparse.Namespace, in_flight: int, turns: int) -> dict[str, Any]:
    servers, latency_s = options.servers, options.latency
    recipe = make_recipe(options.model, in_flight, turns, servers)
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder) / "run")
        for path in (run.control, run.root / "metrics", run.attempt_logs(1), run.traces("train").parent):
            path.mkdir(parents=True, exist_ok=True)
        plan = compile_plan(
            recipe, load_profile("local").profile, run_dir=str(run.root), python=sys.executable
        )
        write_json(run.plan, plan.model_dump(mode="json"))
        ready, processes = Path(folder) / "port", []
        try:
            processes.append(
                start(
                    [__file__, "--mock", str(ready), "--latency", str(latency_s)], Path(folder) / "mock.log"
                )
            )
            for index in range(servers):
                name = process_name(Role.ENV_SERVER, index)
                words = ["-m", "primerl_hpc.roles.env_server", str(run.root), MAIN_PHASE, name]
                variables = {env.RUN_DIR: str(run.root), env.PROCESS: name, env.PHASE: MAIN_PHASE}
                processes.append(start(words, run.attempt_logs(1) / f"{name}.log", **variables))
            wait_until(lambda: ready.exists() or None, what="the mock engine", timeout_s=60)
            url = f"http://127.0.0.1:{ready.read_text()}"
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                result = runner.run(drive(run, recipe, url, options.seconds, options.warm_up))
        finally:
            for process in processes:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    is_known = None not in (result["cpu_ms"], result["verifiers_ms"])
    beyond = result["cpu_ms"] - result["verifiers_ms"] if is_known else None
    return {"in_flight": in_flight, "turns": turns, **result, "beyond_ms": beyond}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="model folder created by tools/tiny-model (its tokenizer is used)"
    )
    parser.add_argument("--in-flight", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--servers", type=int, default=2, help="environment servers")
    parser.add_argument("--latency", type=float, default=1.0, help="latency of the mock engine in seconds")
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of each measurement in seconds")
    parser.add_argument("--warm-up", type=float, default=90.0, help="maximum seconds before each measurement")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mock", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mock:
        serve_mock(options.latency, options.mock)
        return 0
    if not options.model:
        parser.error("--model is needed")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and ends its child processes
    rows = [measure(options, in_flight, turns) for turns in options.turns for in_flight in options.in_flight]
    show(f"orchestrator, mock engine of {options.latency:g} s", rows, as_json=options.json)
    with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
        return 0 if is_good(rows) else 1


def is_good(rows: list[dict[str, Any]]) -> bool:
    """Return for each figure whether it meets its requirement."""
    own = [row["beyond_ms"] for row in rows if row["turns"] == 1 and row["beyond_ms"] is not None]
    lags = [row["lag_p99_ms"] for row in rows if row["in_flight"] == LAG_IN_FLIGHT]
    met = not own or is_met("own CPU ms of a single-turn rollout", max(own), at_most=OWN_MS)
    return (not lags or is_met(f"lag p99 ms of {LAG_IN_FLIGHT} in flight", max(lags), at_most=LAG_MS)) and met


if __name__ == "__main__":
    sys.exit(main())
