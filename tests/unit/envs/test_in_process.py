"""Model calls without HTTP: the same rollouts as over the endpoint's socket."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import verifiers.v1 as vf
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.types import SamplingConfig

from primerl_hpc.envs.serving import in_process
from primerl_hpc.envs.tasks import resolve_environment
from primerl_hpc.recipe.schema.rollout import Environment
from tests.support.api import Request, chat_completion, serve


@pytest.fixture
def tracked(monkeypatch: pytest.MonkeyPatch):
    """Verifiers as in an environment server; restored afterwards."""
    for name in ("register", "unregister"):
        monkeypatch.setattr(InterceptionServer, name, getattr(InterceptionServer, name))
    in_process.track_servers()


def rollout(environment: Environment, statuses: list[int]) -> tuple[dict[str, Any], list[dict], int]:
    """Run one rollout with a server that responds with ``statuses``, then 200.

    Returns parts of its trace, the bodies that the server received, and the number of calls over the socket of
    verifiers' endpoint.
    """
    seen: list[dict] = []

    def answer(request: Request) -> tuple[int, dict]:
        seen.append(request.body)
        status = statuses.pop(0) if statuses else 200
        return status, chat_completion({"content": f"reply {len(seen)}"})

    async def run(url: str) -> Any:
        env = vf.load_environment(resolve_environment(environment))
        task = next(iter(env.taskset.load()))
        client = EvalClientConfig(base_url=f"{url}/v1", api_key_var="NO_KEY")
        context = vf.ModelContext(model="m", client=client, sampling=SamplingConfig(max_tokens=5))
        async with env.serving():
            return await env.run_slot(env.slots(task)[0], context)

    sockets: list[str] = []
    handle = InterceptionServer.handle_request

    async def counted(self: Any, request: Any, dialect: Any) -> Any:
        sockets.extend(["call"] if hasattr(request, "transport") else [])
        return await handle(self, request, dialect)

    InterceptionServer.handle_request = counted
    try:
        with serve(answer) as url:
            episode = asyncio.run(run(url))
    finally:
        InterceptionServer.handle_request = handle
    (trace,) = episode.traces
    said = {
        "ok": trace.ok,
        "stop": trace.stop_condition,
        "messages": [(message.role, message.content) for message in trace.messages],
        "nodes": [(node.parent, node.sampled) for node in trace.nodes],
        "calls": [
            (call.node, call.finish_reason, call.error.status_code if call.error else None)
            for call in trace.calls
        ],
        "errors": [(error.type, error.status_code) for error in trace.errors],
        "rewards": sorted(trace.rewards),
    }
    return said, seen, len(sockets)


CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "one turn": ({"id": "reverse-text"}, []),
    "several turns": ({"id": "alphabet-sort"}, []),
    "turns end at the limit": ({"id": "alphabet-sort", "env_args": {"agent": {"max_turns": 1}}}, []),
    "a failed call is repeated": ({"id": "reverse-text"}, [503, 429]),
    "a refused call fails the rollout": ({"id": "reverse-text"}, [400]),
    "retries end": (
        {"id": "reverse-text", "env_args": {"agent": {"harness": {"max_retries": 1}}}},
        [500, 500],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rollout_is_the_same_without_http(case: str, request: pytest.FixtureRequest) -> None:
    arguments, statuses = CASES[case]
    over_http = rollout(Environment(**arguments), list(statuses))
    request.getfixturevalue("tracked")
    here = rollout(Environment(**arguments), list(statuses))
    assert here[:2] == over_http[:2]
    assert over_http[2] > 0 == here[2]


def test_a_rollout_that_has_ended_is_not_served_here(tracked: None) -> None:
    rollout(Environment(id="reverse-text"), [])
    assert not in_process._handlers
