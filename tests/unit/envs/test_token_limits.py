"""External servers that refuse ``max_tokens``, as the APIs of reasoning models do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import verifiers.v1 as vf
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.dialects.chat import ChatDialect

from primerl_hpc.envs.serving.token_limits import rename_token_limits
from primerl_hpc.envs.tasks import resolve_environment
from primerl_hpc.orchestrator.rollouts.env_client import external_sampling_config
from primerl_hpc.recipe.schema.evaluation import TokenLimit
from primerl_hpc.recipe.schema.rollout import Environment, Sampling
from tests.support.api import Request, chat_completion, serve


@pytest.fixture(autouse=True)
def renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChatDialect, "apply_overrides", ChatDialect.apply_overrides)
    rename_token_limits()


def bodies(token_limit: TokenLimit) -> tuple[bool, list[dict[str, Any]]]:
    """Run a rollout with a server that refuses the other name; return (it succeeded, bodies of its requests)."""
    seen: list[dict[str, Any]] = []

    def answer(request: Request) -> tuple[int, dict[str, Any]]:
        seen.append(request.body)
        if "max_tokens" in request.body:
            return 400, {
                "error": {"message": "Unsupported parameter: max_tokens. Use max_completion_tokens."}
            }
        return 200, chat_completion({"content": "reply"})

    async def run(url: str) -> Any:
        env = vf.load_environment(resolve_environment(Environment(id="reverse-text")))
        task = next(iter(env.taskset.load()))
        client = EvalClientConfig(base_url=f"{url}/v1", api_key_var="NO_KEY")
        sampling = external_sampling_config(Sampling(max_tokens=5), token_limit)
        context = vf.ModelContext(model="m", client=client, sampling=sampling)
        async with env.serving():
            return await env.run_slot(env.slots(task)[0], context)

    with serve(answer) as url:
        (trace,) = asyncio.run(run(url)).traces
    return trace.ok, seen


def test_the_limit_is_sent_under_the_name_that_the_server_accepts() -> None:
    ok, (body,) = bodies("max_completion_tokens")
    assert ok and body["max_completion_tokens"] == 5
    assert not {"max_tokens", "primerl_token_limit"} & body.keys()


def test_the_usual_name_is_sent_by_default() -> None:
    ok, seen = bodies("max_tokens")
    assert not ok and seen[0]["max_tokens"] == 5 and "max_completion_tokens" not in seen[0]
