"""Client of one environment server: runs rollouts there, and detects at once when the server dies.

    client = EnvServerClient(run, "env_server-0", environment)
    await client.wait_ready(timeout_s=recipe.timeouts.env_server_ready_s)          # raises TimeoutWaitingError
    episode = await client.run(task_data, train_client(recipe.model, router_url), recipe.policy_name,
                               sampling_config(recipe.rollouts.sampling, version), timeout_s=environment.timeout_s)
    client.is_up; await client.close()

``run`` returns verifiers' WireEpisode (``episode.ok``, ``episode.traces[i].branches[j].token_ids …``) and raises

    EnvServerDied       the server died or was restarted during the rollout: run it again, nothing of it is left
    TimeoutError        the rollout took longer than ``timeout_s``; it is cancelled at the server
    EnvServerError      the server refused the request (bad task data, unknown model, …)
    CancelledError      the awaiting task was cancelled; the server aborts the rollout and its engine request

While the server is down, ``run`` waits up to ``restart_timeout_s`` for its successor; nothing is queued at a dead
server. verifiers' own client does not detect a dead server (its calls stay pending forever), so this module watches the
endpoint file: it disappears when the process exits, and a restarted server has another incarnation. A server that is
published but does not respond for ``health_s`` (frozen, or stuck in an environment's code) is abandoned, and its
restart is requested from the supervisor. A server that the recipe names by address publishes nothing: its connection is
watched instead, and it is abandoned when the connection breaks or when it does not respond for ``health_s``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from primerl_hpc.common import env
from primerl_hpc.common.errors import RoleError, TimeoutWaitingError
from primerl_hpc.common.waiting import paced
from primerl_hpc.envs.serving.token_limits import TOKEN_LIMIT
from primerl_hpc.recipe.renderer import renderer_config
from primerl_hpc.recipe.schema.evaluation import External, TokenLimit
from primerl_hpc.recipe.schema.model import Model
from primerl_hpc.recipe.schema.rollout import Environment, Sampling
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.endpoints import EndpointWatch, read_endpoint, request_restart
from primerl_hpc.run.rundir import RunDir

if TYPE_CHECKING:  # verifiers takes seconds to import
    import zmq.asyncio
    from verifiers.v1.configs.client import ClientConfig, EvalClientConfig, TrainClientConfig
    from verifiers.v1.episode import WireEpisode
    from verifiers.v1.serve import EnvClient
    from verifiers.v1.types import SamplingConfig

logger = logging.getLogger(__name__)

_HEALTH_TIMEOUT_S = 2.0
_HEALTH_EVERY_S = 5.0
_CANCEL_AGAIN_S = 1.0
IDLE_POLLS = 50
"""Interval between reads of the endpoint in a long wait, in multiples of ``poll_s``."""


class EnvServerDied(RoleError):
    """The environment server exited while it ran a rollout, or did not come back in time."""


class EnvServerError(RoleError):
    """The environment server is healthy but refused a request."""


async def _is_healthy(client: EnvClient, timeout_s: float) -> bool:
    """True if the server responds in time.

    verifiers' own timeout uses ``asyncio.wait_for``, which on Python 3.11 loses a cancellation that arrives together
    with the response (python/cpython#86296); `EnvServerClient.close` would then wait forever.
    """
    try:
        async with asyncio.timeout(timeout_s):
            # verifiers declares a number and passes it to asyncio.wait_for, for which None is no limit
            return await client.health(timeout=None)  # pyright: ignore[reportArgumentType]
    except TimeoutError:
        return False


class EnvServerClient:
    """Connection to one environment server."""

    def __init__(
        self,
        run_dir: RunDir,
        process: str,
        environment: Environment,
        *,
        poll_s: float = 0.2,
        restart_timeout_s: float = 120.0,
        health_s: float = 300.0,
        endpoints: EndpointWatch | None = None,
    ) -> None:
        """``process``: ``env_server-<i>``; unused if the environment has an address. ``endpoints``: a watch that other
        clients use too; None: the endpoint is read at each look.

        Watching starts at the first `wait_ready` or `run`, in the event loop of that call.
        """
        self.run_dir, self.process, self.environment = run_dir, process, environment
        self.poll_s, self.restart_timeout_s, self.health_s = poll_s, restart_timeout_s, health_s
        self.endpoints = endpoints
        self._health_check: asyncio.Task[bool] | None = None  # of the connected server, in flight
        self._checked_at = self._next_check = self._last_response_at = 0.0
        self._identity: tuple[Any, ...] | None = None  # of the connected server
        self.published: dict[str, Any] = {}
        """Endpoint of the server of the current or last connection; empty for a server with an address."""
        self._client: EnvClient | None = None
        self._losses: zmq.asyncio.Socket | None = None  # reports disconnects of a server with an address
        self._up = asyncio.Event()
        self._running: set[asyncio.Timeout] = set()  # of the rollouts at that server; all expire when it dies
        self._watcher: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """True while connected to a server that responded."""
        return self._up.is_set()

    @property
    def published_endpoints(self) -> list[dict[str, Any]]:
        """Endpoints of the server or servers of this environment."""
        return [self.published]

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server is up. Raises TimeoutWaitingError if it is not published and healthy in time."""
        self._ensure_watcher()
        if self._up.is_set():
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        except TimeoutError:
            raise TimeoutWaitingError(
                f"the server of environment {self.environment.label} was not ready after {timeout_s:.0f} s",
                hint=f"see the log of {self.process}",
            ) from None

    async def run(
        self,
        task_data: dict[str, Any],
        client: ClientConfig,
        model: str,
        sampling: SamplingConfig,
        timeout_s: float | None = None,
    ) -> WireEpisode:
        """Run one rollout of the task (the module docstring lists the errors).

        ``timeout_s`` counts from the moment a live server has the request; default: the environment's timeout.
        """
        timeout_s = self.environment.timeout_s if timeout_s is None else timeout_s
        try:
            await self.wait_ready(self.restart_timeout_s)
        except TimeoutWaitingError as error:
            raise EnvServerDied(error.cause, hint=error.hint) from None
        assert self._client is not None
        server, limit = self._client, asyncio.timeout(timeout_s)
        try:
            async with limit:
                self._running.add(limit)
                episode = await server.run(client=client, model=model, sampling=sampling, task_data=task_data)
                self._last_response_at = time.monotonic()
                return episode
        except TimeoutError:  # verifiers has cancelled the rollout at the server
            if self._client is server:
                raise TimeoutError(
                    f"a rollout of environment {self.environment.label} took longer than {timeout_s:.0f} s"
                ) from None
            raise EnvServerDied(
                f"the server of environment {self.environment.label} died during a rollout"
            ) from None
        except RuntimeError as error:  # verifiers' error for an error response of the server
            raise EnvServerError(str(error), location=f"environment {self.environment.label}") from error
        finally:
            self._running.discard(limit)

    @property
    def episodes(self) -> dict[str, int]:
        """Number of episodes at the server, by its name."""
        return {self.process: len(self._running)}

    async def close(self) -> None:
        """Stop watching and cancel running rollouts."""
        if self._watcher is not None:
            self._watcher.cancel()
            # verifiers' close swallows a cancellation that arrives while it waits for one of its own
            while (await asyncio.wait({self._watcher}, timeout=_CANCEL_AGAIN_S))[1]:
                self._watcher.cancel()
            self._watcher = None
        await self._disconnect()

    # -- watching ----------------------------------------------------------------------------------
    def _ensure_watcher(self) -> None:
        if self._watcher is None:
            address = self.environment.address
            self._watcher = asyncio.create_task(self._watch_address(address) if address else self._watch())
        elif self._watcher.done():
            self._watcher.result()  # an error in the watcher must not look like a server that does not start

    async def _watch(self) -> None:
        is_logged, changed_at = False, time.monotonic()
        while True:
            try:
                before = self._identity
                await self._follow_endpoint()
                if before != self._identity or not self.is_up:
                    changed_at = time.monotonic()
                is_logged = False
            except OSError as error:  # a transient filesystem error: keep the connection as it is
                if not is_logged:
                    logger.warning(
                        "cannot read the endpoint of environment %s, retrying: %s",
                        self.environment.label,
                        error,
                    )
                is_logged = True
            await asyncio.sleep(paced(time.monotonic() - changed_at, self.poll_s, IDLE_POLLS * self.poll_s))

    async def _follow_endpoint(self) -> None:
        """Connect to the server that the endpoint file names. Raises OSError on filesystem errors."""
        endpoint = await asyncio.to_thread(self._read_endpoint)
        identity: tuple[Any, ...] | None = None
        if endpoint is not None:
            identity = tuple(endpoint[key] for key in ("attempt", "incarnation", "pid", "url"))
        if identity != self._identity:
            await self._disconnect()
            if endpoint is not None and identity is not None:
                self.published = endpoint
                await self._connect(identity, endpoint["url"])
        elif endpoint is not None and await self._is_unresponsive():
            reason = f"did not respond for {self.health_s:.0f} s"
            incarnation = endpoint["incarnation"]
            await asyncio.to_thread(request_restart, self.run_dir, self.process, incarnation, reason)
            await self._disconnect()

    def _read_endpoint(self) -> dict[str, Any] | None:
        if self.endpoints is None:
            return read_endpoint(self.run_dir, self.process)
        if not self.is_up:
            self.endpoints.hurry()
        return self.endpoints.get(self.process)

    async def _is_unresponsive(self) -> bool:
        """True if a health check timed out and nothing else was received from the server since it was sent.

        One health check is in flight at a time, with `_HEALTH_EVERY_S` between them.
        """
        assert self._client is not None
        now = time.monotonic()
        if self._health_check is None:
            if now >= self._next_check:
                self._checked_at = now
                self._health_check = asyncio.create_task(_is_healthy(self._client, self.health_s))
        elif self._health_check.done():
            if not self._health_check.result() and self._last_response_at <= self._checked_at:
                return True
            self._health_check, self._next_check = None, now + _HEALTH_EVERY_S
        return False

    async def _watch_address(self, address: str) -> None:
        while True:
            if self._client is None:
                await self._connect((address,), address)
            if self._client is not None and (await self._is_lost() or await self._is_unresponsive()):
                await self._disconnect()
            await asyncio.sleep(self.poll_s)

    async def _is_lost(self) -> bool:
        """True if the connection broke since the first call for this connection.

        ZeroMQ reconnects by itself, also to a successor of the server, which does not know its predecessor's rollouts.
        """
        import zmq

        assert self._client is not None
        if self._losses is None:
            self._losses = self._client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        return bool(await self._losses.poll(0))

    async def _connect(self, identity: tuple[Any, ...], url: str) -> None:
        """Connect with a fresh socket, so that it contains no message for a predecessor.

        If the server does not respond, the next poll tries again.
        """
        from verifiers.v1.serve import EnvClient

        from primerl_hpc.envs.curve import curve_client

        if self.environment.address is None:
            client = curve_client(url, run_keys(self.run_dir).curve("env_server"))
        else:  # a server that is not part of the run
            client = EnvClient(url)
        try:
            is_healthy = await _is_healthy(client, _HEALTH_TIMEOUT_S)
        except asyncio.CancelledError:
            await client.close()
            raise
        if not is_healthy:
            await client.close()
            return
        self._identity, self._client = identity, client
        self._up.set()
        logger.info("environment %s is served at %s", self.environment.label, url)

    async def _disconnect(self) -> None:
        """Expire all running rollouts, then close the socket."""
        if self._client is None:
            return
        logger.info("disconnected from the server of environment %s", self.environment.label)
        client, self._client, self._identity = self._client, None, None
        if self._health_check is not None:
            self._health_check.cancel()
            self._health_check = None
        self._up.clear()
        now = asyncio.get_running_loop().time()
        for limit in self._running:
            if not limit.expired():
                limit.reschedule(now)
        while self._running:  # the rollouts cancel their requests before the socket is closed
            await asyncio.sleep(0)
        if self._losses is not None:  # an open monitor socket would keep its context alive
            client.socket.disable_monitor()
            self._losses.close()
            self._losses = None
        await client.close()


# -- contents of a request -------------------------------------------------------------------------


def train_client(model: Model, router_url: str) -> TrainClientConfig:
    """Return the client configuration for token-in, token-out requests through the router.

    Episodes then carry token ids and log-probabilities. The key itself is not sent: the environment server reads it
    from the environment variable that is named here.
    """
    from verifiers.v1.configs.client import TrainClientConfig

    return TrainClientConfig.model_validate(
        {
            "base_url": f"{router_url}/v1",
            "api_key_var": env.ENGINE_API_KEY,
            "renderer": renderer_config(model),
            "renderer_model_name": model.tokenizer or model.name,
        }
    )


def external_client(external: External) -> EvalClientConfig:
    """Return the client configuration for chat completions of an external server.

    Episodes then carry texts and token counts, no tokens.
    """
    from verifiers.v1.configs.client import EvalClientConfig

    return EvalClientConfig(base_url=external.base_url, api_key_var=external.key_variable)


def external_sampling_config(sampling: Sampling, token_limit: TokenLimit = "max_tokens") -> SamplingConfig:
    """Return only the parameters that differ from their defaults.

    External servers may refuse parameters that they do not know. ``token_limit``: the server's name of the limit,
    which environment servers use (`envs.serving.token_limits`).
    """
    from verifiers.v1.types import SamplingConfig

    named = {"temperature": sampling.temperature, "max_tokens": sampling.max_tokens}
    unset = Sampling()
    named |= {
        name: value
        for name in ("top_p", "top_k", "min_p")
        if (value := getattr(sampling, name)) != getattr(unset, name)
    }
    renamed = {} if token_limit == "max_tokens" else {TOKEN_LIMIT: token_limit}
    return SamplingConfig.model_validate({**named, **sampling.extra, **renamed})


def sampling_config(sampling: Sampling, version: int) -> SamplingConfig:
    """Return every sampling parameter explicitly, so that no default of the model or engine applies.

    The cache salt contains the policy version, so a request never reuses prefixes computed with other weights. It also
    contains the orchestrator's incarnation: after a recovery the same version number is another policy, and requests of
    the previous incarnation may still be running.
    """
    from verifiers.v1.types import SamplingConfig

    return SamplingConfig.model_validate(
        {
            **sampling.model_dump(exclude={"extra"}),
            **sampling.extra,
            "cache_salt": f"{env.instance_id()}.{version}",
        }
    )
