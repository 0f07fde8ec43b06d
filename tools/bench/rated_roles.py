"""Engine and trainer of known speed, started by the supervisor in place of the real ones (`simulator_truth.py`).

    python tools/bench/rated_roles.py -m primerl_hpc.roles.inference RUN_DIR PHASE NAME

The engine speaks the protocol of our vLLM server: pause, load, resume, metrics, token route, TLS. Its sequences share
it: with b running ones each advances by a token every t(b) seconds; lengths are drawn from a distribution, and replies
are a few tokens whatever their length. As in vLLM, a sequence ends when its client disconnects: a cancelled rollout
leaves its engine at once. The trainer waits for batches in the run directory, takes a fixed time, and
publishes an empty policy version. Both read their speeds from the JSON file in the variable RATED.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from primerl_hpc.common.names import Role  # noqa: E402
from primerl_hpc.plan.simulation.lengths import Lengths  # noqa: E402
from primerl_hpc.plan.simulation.sides import EngineSide  # noqa: E402
from primerl_hpc.roles.start import RoleProcess, start_role  # noqa: E402
from primerl_hpc.run.access.keys import run_keys  # noqa: E402
from primerl_hpc.run.endpoints import publish_endpoint  # noqa: E402
from primerl_hpc.run.metrics import MetricsWriter  # noqa: E402
from primerl_hpc.run.ports import bind_listener, listen_host  # noqa: E402

REPLY = [*range(40, 46), 2]  # 2 is the end token of the tiny model
TICK_S = 0.02
NUM_LENGTHS = 32
"""Lengths are dealt like cards: each once in every 32 requests of an engine. So a run of a few hundred rollouts has the
mean of the distribution, and is compared with the mean of the simulations."""


def rated() -> dict[str, Any]:
    return json.loads(Path(os.environ["RATED"]).read_text())


def lengths_of(values: dict[str, Any]) -> Lengths:
    return coarse_lengths(values["mean_tokens"], values["cv"])


def coarse_lengths(mean: float, cv: float) -> Lengths:
    """Return a lognormal distribution as `NUM_LENGTHS` equally likely values, each the mean of its quantiles."""
    fine = Lengths.lognormal(mean, cv, 20 * mean).values
    size = len(fine) // NUM_LENGTHS
    if not size:
        return Lengths(fine)
    return Lengths(tuple(sum(fine[start : start + size]) / size for start in range(0, len(fine), size)))


class DealtLengths(Lengths):
    """The same values, dealt as the engines deal them, for the simulation of a run of rated engines.

    A batch of a dealt deck nearly always has one of the longest rollouts, a batch of independent draws often has none.
    """

    def drawer(self, random: random.Random) -> Callable[[], float]:
        deck: list[float] = []

        def deal() -> float:
            if not deck:
                deck.extend(self.values)
                random.shuffle(deck)
            return deck.pop()

        return deal


class RatedEngine:
    """Sequences that advance together, in ticks of the wall clock."""

    def __init__(self, side: EngineSide, lengths: Lengths, seed: int) -> None:
        self.side, self.lengths, self.random = side, lengths, random.Random(seed)
        self.deck: list[float] = []
        self.running: dict[int, tuple[float, asyncio.Event]] = {}
        self.waiting: list[tuple[float, asyncio.Event]] = []
        self.is_paused, self.version, self.generated, self.number = False, 0, 0.0, 0
        self.requests, self.seconds = 0, 0.0  # that ended, and their time in this engine
        self.aborted = 0  # requests whose client disconnected
        self.idle_times: list[
            tuple[float, float]
        ] = []  # end by the wall clock, seconds without a running sequence

    async def advance(self) -> None:
        """Advance forever."""
        last = time.perf_counter()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            passed, last = now - last, now
            if not self.running:
                self.idle_times.append((time.time(), passed))
            if self.is_paused or not self.running:
                continue
            tokens = passed / self.side.token_s(len(self.running))
            self.generated += tokens * len(self.running)
            for key, (left, done) in list(self.running.items()):
                if left <= tokens:
                    del self.running[key]
                    done.set()
                else:
                    self.running[key] = (left - tokens, done)
            self._admit()

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.side.max_running:
            self.number += 1
            self.running[self.number] = self.waiting.pop(0)

    async def generate(self, turns: int) -> None:
        """Wait until a new sequence has all its tokens. If the caller is cancelled, the sequence ends."""
        if not self.deck:
            self.deck = list(self.lengths.values)
            self.random.shuffle(self.deck)
        tokens, done = self.deck.pop() / turns, asyncio.Event()
        started = time.perf_counter()
        self.waiting.append((tokens, done))
        self._admit()
        try:
            await done.wait()
        except asyncio.CancelledError:
            self._abort(done)
            raise
        self.requests, self.seconds = self.requests + 1, self.seconds + time.perf_counter() - started

    def _abort(self, done: asyncio.Event) -> None:
        self.aborted += 1
        self.waiting = [item for item in self.waiting if item[1] is not done]
        self.running = {key: item for key, item in self.running.items() if item[1] is not done}
        self._admit()


def serve_engine(role: RoleProcess) -> None:
    asyncio.run(_serve(role))


async def _serve(role: RoleProcess) -> None:
    values = rated()
    engine = RatedEngine(engine_side(values), lengths_of(values), seed=100 * values["seed"] + role.index)
    await _run(role, engine_app(engine, values, role.process, role.recipe.policy_name), engine)


def engine_side(values: dict[str, Any]) -> EngineSide:
    return EngineSide(1, tuple(map(tuple, values["curve"])), values["max_running"])


def engine_app(engine: RatedEngine, values: dict[str, Any], process: str, policy: str) -> Any:
    """Return the aiohttp application with the routes of our vLLM server that a run uses."""
    from aiohttp import web

    content = [{"token": f"token_id:{token}", "logprob": -0.5} for token in REPLY]
    choice = {"index": 0, "token_ids": REPLY, "finish_reason": "stop", "logprobs": {"content": content}}

    async def generate(_: web.Request) -> web.Response:
        await engine.generate(values["turns"])
        return web.json_response({"request_id": "r", "choices": [choice]})

    async def pause(_: web.Request) -> web.Response:
        engine.is_paused = True
        return web.json_response({"paused": True})

    async def resume(_: web.Request) -> web.Response:
        engine.is_paused = False
        return web.json_response({"paused": False})

    async def update(request: web.Request) -> web.Response:
        await asyncio.sleep(values["pause_s"])
        engine.version = (await request.json())["version"]
        return web.json_response({"version": engine.version})

    async def state(_: web.Request) -> web.Response:
        details = {"process": process, "version": engine.version, "paused": engine.is_paused}
        return web.json_response(details)

    async def metrics(_: web.Request) -> web.Response:
        usage = len(engine.running) / engine.side.max_running
        lines = (
            f"vllm:num_requests_running {len(engine.running)}",
            f"vllm:num_requests_waiting {len(engine.waiting)}",
            f"vllm:kv_cache_usage_perc {usage}",
            f"vllm:generation_tokens_total {engine.generated}",
        )
        return web.Response(text="\n".join(lines) + "\n")

    async def list_models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": policy, "object": "model"}]})

    app = web.Application()
    posts = {
        "/inference/v1/generate": generate,
        "/pause": pause,
        "/resume": resume,
        "/update_weights": update,
    }
    app.add_routes([web.post(path, handler) for path, handler in posts.items()])
    app.add_routes([web.get("/primerl/state", state), web.get("/metrics", metrics)])
    app.add_routes([web.get("/health", state), web.get("/v1/models", list_models)])
    return app


def make_runner(app: Any) -> Any:
    """Return the aiohttp runner of an engine. As in vLLM, a handler ends when its client disconnects."""
    from aiohttp import web

    return web.AppRunner(app, access_log=None, handler_cancellation=True)


async def _run(role: RoleProcess, app: Any, engine: RatedEngine) -> None:
    from aiohttp import web

    keys = run_keys(role.run)
    listener = bind_listener(listen_host(role.plan.num_hosts), role.run.last_port(role.process))
    host, port = listener.getsockname()[:2]
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    certificate = str(keys.server_certificate(role.process, host))
    context.load_cert_chain(certificate)
    runner = make_runner(app)
    await runner.setup()
    await web.SockSite(runner, listener, ssl_context=context, backlog=4096).start()
    ticking = asyncio.create_task(engine.advance())
    publish_endpoint(
        role.run, role.process, f"https://{host}:{port}", model=role.recipe.policy_name, version=0, admin=True
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    ticking.cancel()
    report = {
        "requests": engine.requests,
        "seconds": engine.seconds,
        "idle": engine.idle_times,
        "aborted": engine.aborted,
    }
    (Path(os.environ["RATED"]).parent / f"{role.process}.json").write_text(json.dumps(report))


def train(role: RoleProcess) -> None:
    """Take each batch for a fixed time, and publish a version."""
    from primerl_hpc.trainer.control import write_outcome
    from primerl_hpc.transport.rollouts.filesystem import FilesystemReceiver
    from primerl_hpc.transport.weights.filesystem import WeightWriter

    values, run = rated(), role.run
    receiver, metrics = FilesystemReceiver(run, world_size=1), MetricsWriter(run.metrics("trainer"))
    for step in range(1, role.recipe.steps + 1):
        started = time.perf_counter()
        poll_s = 0.005  # the waits of trainer.control
        while not receiver.is_ready(step):
            time.sleep(poll_s)
            poll_s = min(poll_s * 1.5, 0.25)
        waited_s = time.perf_counter() - started
        time.sleep(values["trainer_s"])
        writer = WeightWriter(run, step)
        writer.begin()
        writer.finish({"version": 1, "files": []})
        step_s = time.perf_counter() - started
        metrics.write(step, {"time/wait_for_batch": waited_s, "time/step": step_s})
        receiver.forget(step - 1)
    write_outcome(role.run, role.process, "done", role.recipe.steps)


def main(words: list[str]) -> int:
    module, *arguments = words[1:]
    if module == f"primerl_hpc.roles.{Role.INFERENCE.value}":
        return start_role("inference", arguments, serve_engine)
    return start_role("trainer", arguments, train)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
