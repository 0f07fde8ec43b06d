"""Starts one engine: binds its port, picks the weights to start from, serves, and publishes itself when it works.

    run_engine(run, plan, phase, "inference-0")        # returns after SIGTERM, raises RoleError when the engine dies

The port is bound here and the open socket handed to vLLM, so nobody can take it in between; a restarted engine asks
for its old port first, so that its URL stays the same. The endpoint is published only after the engine has generated a
token: a listening port is not readiness.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import dataclass
from pathlib import Path

import httpx

from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError, DataError, RoleError
from primerl_hpc.common.listen import bind_listener, listen_host
from primerl_hpc.common.rundir import RunDir, ensure_api_key, publish_endpoint
from primerl_hpc.inference import routes
from primerl_hpc.inference.checkpoint import read_headers
from primerl_hpc.inference.engine_args import engine_args
from primerl_hpc.plan.types import PhasePlan, Plan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartWeights:
    path: str
    version: int
    lease: Path | None = None
    """Held while loading, so that the trainer does not delete the folder."""

    def release(self) -> None:
        if self.lease is not None:
            self.lease.unlink(missing_ok=True)


def choose_start_weights(run: RunDir, base: str, reader: str) -> StartWeights:
    """The newest whole policy version, else the base model as version 0. A damaged folder is passed over aloud."""
    for version in reversed(run.stable_weights()):
        folder = run.weights_step(version)
        lease = run.lease(folder, reader)
        try:
            read_headers(folder)
            return StartWeights(str(folder), version, lease)
        except (DataError, OSError) as error:
            lease.unlink(missing_ok=True)
            logger.warning("policy version %d cannot be served: %s", version, error)
    return StartWeights(base, 0)


def run_engine(run: RunDir, plan: Plan, phase: PhasePlan, process: str) -> None:
    """Serve until SIGTERM. Raises ConfigError for arguments vLLM refuses, RoleError when the engine dies."""
    from primerl_hpc.inference import vllm_compat

    weights = choose_start_weights(run, phase.model_path, process)
    listener = bind_listener(listen_host(len(plan.nodes)), run.last_port(process))
    host, port = listener.getsockname()[:2]
    state = routes.EngineState(
        process, env.attempt(), env.incarnation(), weights.version, api_key=ensure_api_key(run)
    )
    routes.install(state)
    arguments = engine_args(phase.recipe, model_path=weights.path, accelerator=plan.accelerator)
    logger.info("starting vLLM on %s:%d with policy version %d: %s", host, port, weights.version, arguments)
    try:
        args = vllm_compat.parse_serve_args(arguments)
    except (SystemExit, ValueError) as error:
        raise ConfigError(
            f"vLLM refuses the engine's arguments ({error})",
            mend="look at inference.extra_args and layout.inference",
        ) from error

    async def companion() -> None:
        try:
            await probe(f"http://{host}:{port}", state.api_key)
        finally:
            weights.release()
        publish_endpoint(
            run,
            process,
            f"http://{host}:{port}",
            model=phase.recipe.model.name,
            version=weights.version,
            admin=True,
        )
        logger.info("serving %s at http://%s:%d", phase.recipe.model.name, host, port)
        await until_told_to_stop(state)

    try:
        vllm_compat.serve(args, listener, companion)
    finally:
        weights.release()
        listener.close()


async def probe(url: str, api_key: str) -> None:
    """Wait until the server listens and has generated one token. Raises RoleError when it answers but cannot."""
    async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
        while True:  # bounded by the plan's ready_timeout_s, which the supervisor watches
            try:
                if (await client.get(f"{url}/health")).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)
        body = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "temperature": 0.0}}
        headers = {"Authorization": f"Bearer {api_key}"}
        answer = await client.post(f"{url}/inference/v1/generate", json=body, headers=headers)
    if answer.status_code != 200:
        raise RoleError(
            f"the engine started but cannot generate: HTTP {answer.status_code} {answer.text[:300]}"
        )


async def until_told_to_stop(state: routes.EngineState) -> None:
    """Returns on SIGTERM; raises what a route found to be the end of this engine."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()
    state.fault = stop
    loop.add_signal_handler(signal.SIGTERM, lambda: stop.done() or stop.set_result(None))
    await stop
