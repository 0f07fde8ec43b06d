"""One environment server as the orchestrator sees it: runs rollouts there, and notices at once when it dies.

    client = EnvServerClient(run, "env_server-0", environment)
    await client.wait_ready(timeout_s=recipe.timeouts.env_server_ready_s)          # raises TimeoutWaitingError
    episode = await client.run(task_data, train_client(recipe.model, tokenizer, router_url), recipe.policy_name,
                               sampling_config(recipe.rollouts.sampling, version), timeout_s=environment.timeout_s)
    client.is_up; await client.close()

``run`` returns verifiers' WireEpisode (``episode.ok``, ``episode.traces[i].branches[j].token_ids …``) and raises

    EnvServerDied       the server died or was restarted while the rollout ran: run it again, nothing of it is left
    TimeoutError        the rollout took longer than ``timeout_s``; it is cancelled at the server
    EnvServerError      the server refused the request (bad task data, unknown model, …)
    CancelledError      the awaiting task was cancelled; the server aborts the rollout and its engine request

While the server is down ``run`` waits for its successor up to ``restart_timeout_s``; nothing is ever queued at a dead
one. verifiers' own client never learns of a death (its runs stay pending for ever), so the endpoint file is watched
here: it vanishes when the process ends, and a restarted server has another incarnation. One that is there and answers
nobody for ``health_s`` (frozen, or stuck in an environment's code) is given up, and the supervisor is asked for its
successor. A server that the recipe names by address publishes nothing: its connection is watched instead, and it is given
up when that is lost, or when it answers nobody for as long.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from primerl_hpc.common import env
from primerl_hpc.common.errors import RoleError, TimeoutWaitingError
from primerl_hpc.common.rundir import RunDir, read_endpoint, request_restart
from primerl_hpc.recipe.evaluation_schema import External
from primerl_hpc.recipe.model_schema import Model
from primerl_hpc.recipe.renderer import renderer_config
from primerl_hpc.recipe.rollout_schema import Environment, Sampling

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


class EnvServerDied(RoleError):
    """The environment server ended while it ran something for us, or did not come back in time."""


class EnvServerError(RoleError):
    """The environment server is well but refused a request."""


async def _is_well(client: EnvClient, timeout_s: float) -> bool:
    """Whether the server answers in time.

    verifiers' own limit is ``asyncio.wait_for``, which on Python 3.11 loses a cancellation that comes together with the
    answer (python/cpython#86296): whoever closed us then would wait for ever.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await client.health(timeout=None)
    except TimeoutError:
        return False


class EnvServerClient:
    def __init__(
        self,
        run_dir: RunDir,
        process: str,
        environment: Environment,
        *,
        poll_s: float = 0.2,
        restart_timeout_s: float = 120.0,
        health_s: float = 300.0,
    ) -> None:
        """``process``: ``env_server-<i>``; not asked for where the environment has an address. Starts watching at the first `wait_ready` or `run`, in that event loop."""
        self.run_dir, self.process, self.environment = run_dir, process, environment
        self.poll_s, self.restart_timeout_s, self.health_s = poll_s, restart_timeout_s, health_s
        self._asking: asyncio.Task[bool] | None = None  # whether the server that we are connected to is well
        self._asked_at = self._next_ask = self._heard_at = 0.0
        self._identity: tuple[Any, ...] | None = None  # whom we are connected to
        self._client: EnvClient | None = None
        self._losses: zmq.asyncio.Socket | None = (
            None  # broken connections to it, where it is known by address alone
        )
        self._up = asyncio.Event()
        self._running: set[asyncio.Timeout] = set()  # of rollouts at that server; all expire with it
        self._watcher: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """Connected to a server that answered."""
        return self._up.is_set()

    async def wait_ready(self, timeout_s: float) -> None:
        """Raises TimeoutWaitingError when the server is not published and healthy in time."""
        self._ensure_watcher()
        if self._up.is_set():
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        except TimeoutError:
            raise TimeoutWaitingError(
                f"waited {timeout_s:.0f} s for the server of environment {self.environment.label}",
                mend=f"see the log of {self.process}",
            ) from None

    async def run(
        self,
        task_data: dict[str, Any],
        client: ClientConfig,
        model: str,
        sampling: SamplingConfig,
        timeout_s: float | None = None,
    ) -> WireEpisode:
        """One rollout of the task (see the module docstring for what it raises).

        ``timeout_s`` counts from the moment a live server has the request; default: the environment's.
        """
        timeout_s = self.environment.timeout_s if timeout_s is None else timeout_s
        try:
            await self.wait_ready(self.restart_timeout_s)
        except TimeoutWaitingError as error:
            raise EnvServerDied(error.cause, mend=error.mend) from None
        assert self._client is not None
        server, limit = self._client, asyncio.timeout(timeout_s)
        try:
            async with limit:
                self._running.add(limit)
                episode = await server.run(client=client, model=model, sampling=sampling, task_data=task_data)
                self._heard_at = time.monotonic()
                return episode
        except TimeoutError:  # verifiers told the server to give the rollout up
            if self._client is server:
                raise TimeoutError(
                    f"a rollout of {self.environment.label} took longer than {timeout_s:.0f} s"
                ) from None
            raise EnvServerDied(
                f"the server of environment {self.environment.label} died during a rollout"
            ) from None
        except RuntimeError as error:  # how verifiers says that the server answered with an error
            raise EnvServerError(str(error), place=f"environment {self.environment.label}") from error
        finally:
            self._running.discard(limit)

    async def close(self) -> None:
        """Stop watching and give up what is running."""
        if self._watcher is not None:
            self._watcher.cancel()
            # verifiers' close takes a cancellation that comes while it waits for that of its own
            while (await asyncio.wait({self._watcher}, timeout=_CANCEL_AGAIN_S))[1]:
                self._watcher.cancel()
            self._watcher = None
        await self._disconnect()

    # -- watching ------------------------------------------------------------------------------------------------
    def _ensure_watcher(self) -> None:
        if self._watcher is None:
            address = self.environment.address
            self._watcher = asyncio.create_task(self._watch_address(address) if address else self._watch())
        elif self._watcher.done():
            self._watcher.result()  # a fault of our own must not look like a server that does not come

    async def _watch(self) -> None:
        is_told = False
        while True:
            try:
                await self._look()
                is_told = False
            except OSError as error:  # a filesystem's fault passes; until then we stay as we are
                if not is_told:
                    logger.warning(
                        "cannot see where environment %s is served, trying again: %s",
                        self.environment.label,
                        error,
                    )
                is_told = True
            await asyncio.sleep(self.poll_s)

    async def _look(self) -> None:
        """Be connected to whom the endpoint file names. Raises OSError when files cannot be read or written now."""
        endpoint = read_endpoint(self.run_dir, self.process)
        identity = endpoint and (
            endpoint["attempt"],
            endpoint["incarnation"],
            endpoint["pid"],
            endpoint["url"],
        )
        if identity != self._identity:
            await self._disconnect()
            if endpoint is not None:
                await self._connect(identity, endpoint["url"])
        elif endpoint is not None and await self._is_silent():
            reason = f"answered nobody for {self.health_s:.0f} s"
            request_restart(self.run_dir, self.process, endpoint["incarnation"], reason)
            await self._disconnect()

    async def _is_silent(self) -> bool:
        """One question at a time, now and then: whether its time is up, and nobody heard an answer or the end of a rollout."""
        assert self._client is not None
        now = time.monotonic()
        if self._asking is None:
            if now >= self._next_ask:
                self._asked_at = now
                self._asking = asyncio.create_task(_is_well(self._client, self.health_s))
        elif self._asking.done():
            if not self._asking.result() and self._heard_at <= self._asked_at:
                return True
            self._asking, self._next_ask = None, now + _HEALTH_EVERY_S
        return False

    async def _watch_address(self, address: str) -> None:
        while True:
            if self._client is None:
                await self._connect((address,), address)
            if self._client is not None and (await self._is_lost() or await self._is_silent()):
                await self._disconnect()
            await asyncio.sleep(self.poll_s)

    async def _is_lost(self) -> bool:
        """Whether the connection broke since this was first asked of it.

        ZeroMQ connects anew by itself, to a successor as well, which knows nothing of its predecessor's rollouts.
        """
        import zmq

        assert self._client is not None
        if self._losses is None:
            self._losses = self._client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        return bool(await self._losses.poll(0))

    async def _connect(self, identity: tuple[Any, ...], url: str) -> None:
        """A fresh socket, so that nothing meant for a predecessor is in it; tried again until the server answers."""
        from verifiers.v1.serve import EnvClient

        client = EnvClient(url)
        try:
            is_healthy = await _is_well(client, _HEALTH_TIMEOUT_S)
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
        if self._client is None:
            return
        logger.info("the server of environment %s is gone", self.environment.label)
        client, self._client, self._identity = self._client, None, None
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None
        self._up.clear()
        now = asyncio.get_running_loop().time()
        for limit in self._running:
            if not limit.expired():
                limit.reschedule(now)
        while self._running:  # they cancel theirs before the socket closes under them
            await asyncio.sleep(0)
        if self._losses is not None:  # while it is open, its context would not end
            client.socket.disable_monitor()
            self._losses.close()
            self._losses = None
        await client.close()


# -- what a request carries ----------------------------------------------------------------------------------------------


def train_client(model: Model, router_url: str) -> TrainClientConfig:
    """Token-in, token-out through the router: episodes carry token ids and log-probabilities.

    The key itself does not travel: the environment server has it in the variable that is named here.
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
    """Chat completions of a server elsewhere; episodes carry texts and counts, no tokens."""
    from verifiers.v1.configs.client import EvalClientConfig

    return EvalClientConfig(base_url=external.base_url, api_key_var=external.key_variable)


def external_sampling_config(sampling: Sampling) -> SamplingConfig:
    """Only what differs from doing nothing: servers elsewhere refuse parameters that they do not know."""
    from verifiers.v1.types import SamplingConfig

    named = {"temperature": sampling.temperature, "max_tokens": sampling.max_tokens}
    unset = Sampling()
    named |= {
        name: value
        for name in ("top_p", "top_k", "min_p")
        if (value := getattr(sampling, name)) != getattr(unset, name)
    }
    return SamplingConfig.model_validate({**named, **sampling.extra})


def sampling_config(sampling: Sampling, version: int) -> SamplingConfig:
    """Every parameter is sent, so no default of the model's or the engine's slips in.

    The policy version is the cache salt, so a request never meets prefixes of other weights; with the orchestrator's
    life, for after a recovery the same number is another policy, and requests of the life before may still run.
    """
    from verifiers.v1.types import SamplingConfig

    return SamplingConfig.model_validate(
        {
            **sampling.model_dump(exclude={"extra"}),
            **sampling.extra,
            "cache_salt": f"{env.life()}.{version}",
        }
    )
