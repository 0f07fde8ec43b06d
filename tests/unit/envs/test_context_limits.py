"""A conversation that fills the model's context ends there and is scored; only one without a turn fails."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import verifiers.v1 as vf
from renderers.client import OverlongPromptError
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.types import SamplingConfig

from primerl_hpc.envs.serving import in_process
from primerl_hpc.envs.serving.context_limits import end_at_context_limit, is_overflow
from primerl_hpc.envs.tasks import resolve_environment
from primerl_hpc.orchestrator.rollout_data import Rollout, RolloutFailed
from primerl_hpc.orchestrator.rollouts.trajectories import rollout_of
from primerl_hpc.recipe.schema.rollout import Environment
from tests.support.api import Request, chat_completion, serve

TOO_LONG = "This model's maximum context length is 56 tokens. However, you requested 61 tokens."


@pytest.fixture(params=["over http", "in process"])
def patched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifiers as in an environment server; restored afterwards."""
    for name in ("register", "unregister", "record_call"):
        monkeypatch.setattr(InterceptionServer, name, getattr(InterceptionServer, name))
    end_at_context_limit()
    if request.param == "in process":
        in_process.track_servers()


def rollout(turns: int, message: str = TOO_LONG) -> Rollout:
    """Run a rollout of several turns whose server refuses each prompt after ``turns`` ones."""
    seen: list[Request] = []

    def answer(request: Request) -> tuple[int, dict[str, Any]]:
        seen.append(request)
        if len(seen) > turns:
            return 400, {"error": {"message": message, "type": "BadRequestError", "code": 400}}
        return 200, chat_completion({"content": f"reply {len(seen)}"})

    async def run(url: str) -> Any:
        env = vf.load_environment(resolve_environment(Environment(id="alphabet-sort")))
        task = next(iter(env.taskset.load()))
        client = EvalClientConfig(base_url=f"{url}/v1", api_key_var="NO_KEY")
        context = vf.ModelContext(model="m", client=client, sampling=SamplingConfig(max_tokens=5))
        async with env.serving():
            return await env.run_slot(env.slots(task)[0], context)

    with serve(answer) as url:
        episode = asyncio.run(run(url))
    return rollout_of(episode, temperature=1.0, need_tokens=False)


@pytest.mark.usefixtures("patched")
def test_a_conversation_that_fills_the_context_is_scored_as_truncated() -> None:
    ended = rollout(turns=1)
    assert ended.is_truncated and ended.num_turns == 1 and ended.rewards


@pytest.mark.usefixtures("patched")
def test_a_task_whose_first_prompt_does_not_fit_fails_at_a_limit() -> None:
    with pytest.raises(RolloutFailed) as failure:
        rollout(turns=0)
    assert (
        failure.value.is_limit
        and not failure.value.is_engine_fault
        and "maximum context" in str(failure.value)
    )


@pytest.mark.usefixtures("patched")
def test_other_refusals_still_fail_the_rollout() -> None:
    with pytest.raises(RolloutFailed) as failure:
        rollout(turns=1, message="unknown parameter")
    assert not failure.value.is_limit


@pytest.mark.parametrize(
    ("message", "status", "expected"),
    [
        (str(OverlongPromptError(prompt_len=61, max_prompt_len=56)), 400, True),
        (TOO_LONG, 400, True),
        (TOO_LONG, 500, False),
        ('{"code": "context_length_exceeded"}', 400, True),
        ("prompt is too long: 210000 tokens > 200000 maximum", 400, True),
        ("invalid temperature", 400, False),
        (TOO_LONG, None, False),
    ],
)
def test_an_overflow_is_recognized_by_status_and_message(
    message: str, status: int | None, expected: bool
) -> None:
    assert is_overflow(message, status) is expected
