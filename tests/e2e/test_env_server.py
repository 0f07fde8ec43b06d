"""A real environment server: rollouts through verifiers' train client against the real engine, deaths, timeouts, ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
from transformers import AutoTokenizer

from primerl_hpc.common import env
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json
from primerl_hpc.common.names import Role
from primerl_hpc.common.rundir import RunDir, publish_endpoint, read_endpoint
from primerl_hpc.envs.config import environment_of
from primerl_hpc.envs.tasks import EnvironmentTask, load_tasks
from primerl_hpc.orchestrator.distillation import Distillation
from primerl_hpc.orchestrator.env_client import (
    EnvServerClient,
    EnvServerDied,
    EnvServerError,
    external_client,
    external_sampling_config,
    sampling_config,
    train_client,
)
from primerl_hpc.orchestrator.env_pool import EnvServerPool
from primerl_hpc.orchestrator.runner import EnvHandle
from primerl_hpc.orchestrator.self_teacher import demonstrated_prompt
from primerl_hpc.orchestrator.teacher import TeacherClient, add_samples
from primerl_hpc.orchestrator.trajectories import Rollout, RolloutFailed, role_tokens, rollout_of
from primerl_hpc.recipe.algorithm_schema import OPSD
from primerl_hpc.recipe.evaluation_schema import External
from primerl_hpc.recipe.model_schema import Teacher
from primerl_hpc.recipe.renderer import make_renderer
from primerl_hpc.roles.scratch import scratch_path
from tests.api import Request, chat_completion, serve
from tests.e2e.serving import Serving, hf_logprobs, make_recipe
from tests.support import end_role, make_plan, make_tiny_model, process_plan, run_role, start_role

pytestmark = pytest.mark.e2e


def chat_client(router_url: str) -> Any:
    """Chat completions instead of token ids."""
    return external_client(External(base_url=f"{router_url}/v1", key_variable=env.ENGINE_API_KEY))


class Rollouts:
    """What a test needs to run rollouts: a client and tasks."""

    def __init__(self, serving: Serving, server: int = 0) -> None:
        self.serving, self.recipe = serving, serving.recipe
        _, self.environment = environment_of(self.recipe, server)
        self.tasks: list[EnvironmentTask] = load_tasks(self.environment, limit=8)
        self.client = EnvServerClient(serving.run, f"env_server-{server}", self.environment, poll_s=0.02)

    def run(self, number: int = 0, *, timeout_s: float = 120, evaluate: bool = False) -> Awaitable:
        url = self.serving.url("router-0")
        how = chat_client(url) if evaluate else train_client(self.recipe.model, url)
        sampling = sampling_config(self.recipe.rollouts.sampling, 0)
        return self.client.run(self.tasks[number].data, how, self.recipe.model.name, sampling, timeout_s)

    async def until_at_engine(self, count: int) -> None:
        """Until the engine has so many requests that are not answered yet."""
        deadline = time.monotonic() + 60
        async with httpx.AsyncClient(trust_env=False, headers=self.serving.headers) as client:
            while True:
                load = (await client.get(f"{self.serving.url('inference-0')}/load")).json()["server_load"]
                if load == count:
                    return
                assert time.monotonic() < deadline, load
                await asyncio.sleep(0.02)

    async def stuck(self, *rollouts: Awaitable) -> list[asyncio.Future]:
        """The rollouts, started, when each has its request at the engine, which is paused."""
        assert self.serving.post("inference-0", "/pause", {}).status_code == 200
        started = [asyncio.ensure_future(rollout) for rollout in rollouts]
        await self.until_at_engine(len(started))
        return started

    def resume(self) -> None:
        assert self.serving.post("inference-0", "/resume", {}).status_code == 200


def with_rollouts(serving: Serving, check: Callable[[Rollouts], Awaitable[None]], *, server: int = 0) -> None:
    async def main() -> None:
        rollouts = Rollouts(serving, server)
        try:
            await rollouts.client.wait_ready(120)
            await check(rollouts)
        finally:
            await rollouts.client.close()

    asyncio.run(main())


def test_a_rollout_carries_the_tokens_and_logprobs_that_the_engine_saw(serving: Serving) -> None:
    async def check(rollouts: Rollouts) -> None:
        episode = await rollouts.run()
        assert episode.ok, episode.errors
        (trace,) = episode.traces
        (branch,) = trace.branches
        num_sampled = sum(branch.sampled_mask)
        prompt = branch.token_ids[: len(branch.token_ids) - num_sampled]
        completion = branch.token_ids[-num_sampled:]
        assert 1 <= num_sampled <= 12
        assert branch.sampled_mask == [False] * len(prompt) + [True] * num_sampled
        expected = hf_logprobs(serving.model, prompt, completion)
        assert branch.logprobs[-num_sampled:] == pytest.approx(expected, abs=1e-4)
        assert 0 <= trace.rewards["similarity"].score <= 1
        assert set(trace.metrics) == {"exact_match"}

    with_rollouts(serving, check)


def test_an_evaluation_rollout_is_scored(serving: Serving) -> None:
    async def check(rollouts: Rollouts) -> None:
        episode = await rollouts.run(evaluate=True)
        assert episode.ok, episode.errors
        assert "similarity" in episode.traces[0].rewards

    with_rollouts(serving, check)


def test_bad_task_data_is_an_error_and_the_server_lives(serving: Serving) -> None:
    async def check(rollouts: Rollouts) -> None:
        rollouts.tasks[0].data.pop("answer")
        with pytest.raises(EnvServerError, match="answer"):
            await rollouts.run(0)
        assert rollouts.client.is_up
        assert (await rollouts.run(1)).ok

    with_rollouts(serving, check)


def test_kill_9_fails_pending_rollouts_and_the_next_ones_run_on_the_successor(serving: Serving) -> None:
    async def check(rollouts: Rollouts) -> None:
        try:
            pending = await rollouts.stuck(*(rollouts.run(number) for number in range(3)))
            serving.kill("env_server-0")
            outcomes = await asyncio.gather(*pending, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [EnvServerDied] * 3
            assert not rollouts.client.is_up
            await rollouts.until_at_engine(0)
            again = asyncio.ensure_future(rollouts.run(0))  # waits for the successor
            await asyncio.to_thread(serving.start, "env_server-0")
            await rollouts.until_at_engine(1)
        finally:
            rollouts.resume()
        assert (await again).ok

    with_rollouts(serving, check)


def test_a_frozen_server_is_given_up_and_its_successor_asked_for(serving: Serving) -> None:
    async def check(rollouts: Rollouts) -> None:
        rollouts.client.health_s = 1.0
        frozen, request = serving.processes["env_server-0"].pid, serving.run.restart_request("env_server-0")
        life = read_endpoint(serving.run, "env_server-0")["incarnation"]
        os.killpg(frozen, signal.SIGSTOP)
        try:
            with pytest.raises(EnvServerDied):
                await rollouts.run()
            asked = read_json(request)
            assert asked["incarnation"] == life and "answered nobody" in asked["reason"]
        finally:
            rollouts.client.health_s = 300.0
            request.unlink(missing_ok=True)
            os.killpg(frozen, signal.SIGCONT)
        assert (await rollouts.run()).ok  # had nobody restarted it, it would be taken as it is

    with_rollouts(serving, check)


def test_a_rollout_beyond_its_time_or_cancelled_leaves_the_engine(serving: Serving) -> None:
    async def check(rollouts: Rollouts) -> None:
        await rollouts.run()  # so that the next one's time is not spent on loading the tokenizer
        try:
            late, cancelled = await rollouts.stuck(rollouts.run(0, timeout_s=4.0), rollouts.run(1))
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            with pytest.raises(TimeoutError):
                await late
            await rollouts.until_at_engine(0)
        finally:
            rollouts.resume()
        assert (await rollouts.run()).ok

    with_rollouts(serving, check)


def test_a_prompt_longer_than_the_context_is_the_rollouts_own_fault(serving: Serving) -> None:
    async def check(rollouts: Rollouts) -> None:
        rollouts.tasks[0].data["prompt"] = "x" * 2000
        episode = await rollouts.run(0)
        with pytest.raises(RolloutFailed, match=r"ProviderError: .*[Pp]rompt length") as caught:
            rollout_of(episode, temperature=1.0)
        assert not caught.value.is_engine_fault
        assert (await rollouts.run(1)).ok

    with_rollouts(serving, check)


def test_a_server_by_address_is_used_without_being_published(serving: Serving) -> None:
    async def check() -> None:
        rollouts = Rollouts(serving)
        environment = rollouts.environment.model_copy(update={"address": serving.url("env_server-0")})
        rollouts.client = EnvServerClient(serving.run, "env_server-9", environment, poll_s=0.02)
        try:
            assert (await rollouts.run()).ok
        finally:
            await rollouts.client.close()

    asyncio.run(check())


def test_closing_ends_though_an_answer_comes_at_that_moment(serving: Serving) -> None:
    async def check() -> None:
        rollouts = Rollouts(serving)
        environment = rollouts.environment.model_copy(update={"address": serving.url("env_server-0")})
        client = EnvServerClient(serving.run, "env_server-9", environment, poll_s=0.02)
        await client.wait_ready(120)
        questions = client._client._pending  # verifiers keeps them by request
        while not questions:
            await asyncio.sleep(0)
        next(iter(questions.values())).set_result(msgpack.packb({"success": True}))
        closing = asyncio.create_task(client.close())
        await asyncio.wait({closing}, timeout=10)  # from outside: a limit around it is a cancellation as well
        assert closing.done()

    asyncio.run(check())


def test_a_server_that_joins_its_pool_late_takes_its_share(serving: Serving) -> None:
    async def check() -> None:
        rollouts = Rollouts(serving)
        late = EnvServerClient(serving.run, "env_server-9", rollouts.environment, poll_s=0.02)
        rollouts.client = pool = EnvServerPool([late, rollouts.client])
        all_ready = asyncio.create_task(pool.wait_ready(120))
        try:
            assert (await rollouts.run()).ok and not late.is_up  # it waited for whichever comes first
            publish_endpoint(serving.run, "env_server-9", serving.url("env_server-0"))
            await all_ready
            started = await rollouts.stuck(rollouts.run(0), rollouts.run(1))
            await late.close()
            ended, _ = await asyncio.wait(started, return_when=asyncio.FIRST_COMPLETED)
            assert [type(each.exception()) for each in ended] == [EnvServerDied]
            rollouts.resume()
            assert [(await each).ok for each in started if each not in ended] == [True]
        finally:
            serving.run.endpoint("env_server-9").unlink(missing_ok=True)
            await pool.close()

    asyncio.run(check())


def test_a_teacher_of_the_same_weights_says_what_the_policy_said(serving: Serving, monkeypatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", serving.headers["Authorization"].removeprefix("Bearer "))
    url, name = f"{serving.url('inference-0')}/v1", serving.recipe.model.name

    async def check(rollouts: Rollouts) -> None:
        rollout = rollout_of(await rollouts.run(), temperature=1.0)
        settings = {"base_url": url, "model": {"name": name}, "key_variable": "TEACHER_KEY"}
        teacher = TeacherClient(serving.run, Teacher.model_validate(settings))
        tokenizer = AutoTokenizer.from_pretrained(serving.model)
        await teacher.check({"opd", "sft_distill"}, seq_len=serving.recipe.seq_len, tokenizer=tokenizer)
        await teacher.add_logprobs(rollout, seq_len=serving.recipe.seq_len)
        await teacher.close()
        (sample,) = rollout.samples
        assert sample.ref_logprobs == pytest.approx(sample.logprobs, abs=1e-4)

    with_rollouts(serving, check)


def test_a_teachers_words_become_the_tokens_that_the_policy_would_have_sampled(serving: Serving) -> None:
    async def check(rollouts: Rollouts) -> None:
        episode = await rollouts.run(evaluate=True)  # chat completions: text, no tokens
        rollout = rollout_of(episode, temperature=1.0, need_tokens=False)
        add_samples(rollout, episode, renderer_of(serving))
        (sample,) = rollout.samples
        (prompt,) = rollout_of(await rollouts.run(), temperature=1.0).samples
        length = int(np.flatnonzero(prompt.loss_mask)[0])
        assert sample.token_ids[:length].tolist() == prompt.token_ids[:length].tolist()
        assert not sample.loss_mask[:length].any()
        text = AutoTokenizer.from_pretrained(serving.model).decode(sample.token_ids[sample.loss_mask])
        (played,) = episode.traces
        end = "" if played.calls[-1].finish_reason == "length" else "<|im_end|>"
        assert text == played.nodes[-1].message.content + end

    with_rollouts(serving, check)


def test_the_policy_that_read_a_demonstration_scores_what_the_one_without_sampled(serving: Serving) -> None:
    async def check(rollouts: Rollouts) -> None:
        episode = await rollouts.run()
        rollout = rollout_of(episode, temperature=1.0)
        (sample,) = rollout.samples
        distillation = Distillation(serving.run, serving.recipe.model_copy(update={"algorithm": config}))
        try:
            await distillation.prepare([EnvHandle(rollouts.environment, rollouts.client, rollouts.tasks)])
            task, url = rollouts.tasks[0].data, serving.url("router-0")
            await distillation.score(rollout, episode, config, task, router_url=url, live_version=lambda: 0)
        finally:
            await distillation.close()
        (branch,) = episode.traces[0].branches
        prompt = demonstrated_prompt(distillation.renderer, branch, f"say {task['answer']}")
        assert f"<|im_start|>system\nsay {task['answer']}" in tokenizer.decode(prompt)
        first = int(np.flatnonzero(sample.loss_mask)[0])
        assert tokenizer.decode(prompt).endswith(tokenizer.decode(sample.token_ids[:first])[-40:])
        reply = sample.token_ids[first:].tolist()
        assert sample.ref_logprobs[first:] == pytest.approx(
            hf_logprobs(serving.model, prompt, reply), abs=1e-4
        )
        assert not sample.ref_logprobs[:first].any()
        assert np.abs(sample.ref_logprobs - sample.logprobs).max() > 1e-3  # it has read something

    config = OPSD(demo_key="answer", template="say {demonstration}")
    tokenizer = AutoTokenizer.from_pretrained(serving.model)
    with_rollouts(serving, check)


def renderer_of(serving: Serving) -> Any:
    return make_renderer(serving.recipe.model, AutoTokenizer.from_pretrained(serving.model))


def test_a_server_that_does_not_come_back_is_reported(serving: Serving) -> None:
    async def check() -> None:
        environment = serving.recipe.environments.train[0]
        client = EnvServerClient(serving.run, "env_server-9", environment, poll_s=0.02, restart_timeout_s=0.1)
        sampling = sampling_config(serving.recipe.rollouts.sampling, 0)
        with pytest.raises(EnvServerDied, match="reverse-text"):
            await client.run({}, chat_client("http://127.0.0.1:1"), "m", sampling)
        await client.close()

    asyncio.run(check())


def test_the_second_server_is_the_evaluations_asks_the_judge_and_leaves_nothing_behind(
    serving: Serving,
) -> None:
    """The engine is the judge as well, and says nothing that makes sense."""
    shutil.copy(serving.run.endpoint("inference-0"), serving.run.endpoint("judge-0"))
    serving.start("env_server-1")

    async def check(rollouts: Rollouts) -> None:
        with pytest.raises(RolloutFailed, match=r"TaskError: .*judge returned no correct/incorrect verdict"):
            rollout_of(await rollouts.run(), temperature=1.0)
        other = Rollouts(serving).client
        rollouts.client = EnvServerPool([other, rollouts.client])
        await rollouts.client.wait_ready(120)
        episodes = await asyncio.gather(rollouts.run(), rollouts.run())
        assert sorted(episode.ok for episode in episodes) == [
            False,
            True,
        ]  # each had one; the other asks no judge
        assert not rollouts.client._running.total()

    with_rollouts(serving, check, server=1)
    serving.run.endpoint("judge-0").unlink()
    endpoint = read_endpoint(serving.run, "env_server-1")
    assert (endpoint["env"], endpoint["split"]) == ("held-out", "eval")
    scratch = scratch_path(serving.run, "env_server-1")
    assert scratch.is_dir()
    assert serving.terminate("env_server-1") == ExitCode.DONE
    assert not scratch.exists()
    assert list(serving.home.iterdir()) == []


def test_a_judge_that_comes_back_elsewhere_is_asked_there(tmp_path: Path) -> None:
    model, run = (
        make_tiny_model(tmp_path / "tiny", rows=1, hidden=32, layers=1) / "model",
        RunDir(tmp_path / "run"),
    )
    servers = [process_plan(Role.ENV_SERVER, index) for index in range(2)]
    recipe = make_plan(run.root, make_recipe(model), processes=servers).phases[0].recipe
    _, environment = environment_of(recipe, 1)
    (task,) = load_tasks(environment, limit=1)

    async def check(policy: str, successor: str) -> None:
        client = EnvServerClient(run, "env_server-1", environment, poll_s=0.02)
        how = external_client(External(base_url=f"{policy}/v1"))
        sampling = external_sampling_config(recipe.rollouts.sampling)
        try:
            await client.wait_ready(240)
            with pytest.raises(RolloutFailed, match="no correct/incorrect verdict"):
                episode = await client.run(task.data, how, "m", sampling, 120)
                rollout_of(episode, temperature=1.0, need_tokens=False)
            publish_endpoint(run, "judge-0", successor)
            deadline = time.monotonic() + 60
            while not (episode := await client.run(task.data, how, "m", sampling, 120)).ok:
                assert time.monotonic() < deadline, "the judge that came back elsewhere is not asked"
            assert episode.traces[0].rewards["reference"].value == 1
        finally:
            await client.close()

    def says(word: str) -> str:
        return stack.enter_context(serve(lambda _: (200, chat_completion({"content": word}))))

    with contextlib.ExitStack() as stack:
        publish_endpoint(run, "judge-0", says("perhaps"))
        stack.callback(end_role, start_role(run, "main", "env_server-1"))
        asyncio.run(check(says("a reply"), says("correct")))


QWEN3_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def test_a_tools_answers_are_read_in_tokens_and_only_what_the_policy_wrote_is_trained(tmp_path: Path) -> None:
    """The engine is played: it multiplies by the tool, adds by the tool, says the number."""
    model, run = make_tiny_model(tmp_path / "tiny", rows=1, hidden=32, layers=1) / "model", RunDir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": QWEN3_TOKENS})
    tokenizer.save_pretrained(model)
    recipe = make_recipe(model) | {"seq_len": 4096, "inference": {"max_model_len": 4096}}
    recipe["model"]["renderer"] = {"name": "qwen3"}
    recipe["environments"] = {"train": [{"id": "calculator", "args": {"num_tasks": 1}}]}
    recipe = make_plan(tmp_path, recipe, processes=[process_plan(Role.ENV_SERVER)]).phases[0].recipe
    environment = recipe.environments.train[0]
    (task,) = load_tasks(environment)
    a, b, c = map(int, re.findall(r"\d+", task.data["prompt"]))
    calls = (
        {"name": "multiply", "arguments": {"a": a, "b": b}},
        {"name": "add", "arguments": {"a": a * b, "b": c}},
    )
    said = [
        *(
            f"<think>\n\n</think>\n\n<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"
            for call in calls
        ),
        f"<think>\nnow I know\n</think>\n\nIt is {a * b + c}.<|im_end|>",
    ]
    replies = [tokenizer.encode(text, add_special_tokens=False) for text in said]
    prompts: list[list[int]] = []

    def engine(request: Request) -> tuple[int, dict]:
        if not request.body:
            return 200, {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 4096}]}
        prompts.append(request.body["token_ids"])
        reply = replies[len(prompts) - 1]
        content = [{"token": f"token_id:{token}", "logprob": -0.5} for token in reply]
        choice = {"index": 0, "token_ids": reply, "finish_reason": "stop", "logprobs": {"content": content}}
        return 200, {"request_id": "r", "choices": [choice]}

    async def play(url: str) -> Rollout:
        client = EnvServerClient(run, "env_server-0", environment, poll_s=0.02)
        try:
            await client.wait_ready(240)
            sampling = sampling_config(recipe.rollouts.sampling, 0)
            how = train_client(recipe.model, url)
            return rollout_of(await client.run(task.data, how, recipe.model.name, sampling), temperature=1.0)
        finally:
            await client.close()

    server = start_role(run, "main", "env_server-0")
    try:
        with serve(engine) as url:
            rollout = asyncio.run(play(url))
    finally:
        end_role(server)
    assert (rollout.reward, rollout.num_turns, rollout.metrics["tool_calls"]) == (1.0, 3, 2.0)
    (sample,) = rollout.samples
    tokens = sample.token_ids.tolist()
    assert tokens == prompts[-1] + replies[-1]
    for prompt, reply in zip(prompts, replies, strict=True):
        assert tokens[: len(prompt) + len(reply)] == prompt + reply
    assert tokenizer.decode(sample.token_ids[sample.loss_mask]) == "".join(said)
    assert np.all(sample.logprobs[sample.loss_mask] == -0.5) and not sample.logprobs[~sample.loss_mask].any()
    answers = role_tokens(sample, "tool")
    assert tokenizer.decode(sample.token_ids[answers]) == f"{a * b}{a * b + c}"
    assert not (answers & sample.loss_mask).any()


def test_a_chat_template_without_a_renderer_ends_the_server_with_the_models_name(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", rows=1, hidden=32, layers=1) / "model"
    recipe = make_recipe(model)
    recipe["model"]["renderer"] = {"name": "auto"}
    recipe["environments"]["train"][0]["args"] = {"task": {"judges": [{"id": "reference"}]}}
    del recipe["judge"]
    make_plan(tmp_path / "run", recipe, processes=[process_plan(Role.ENV_SERVER)])
    code, log = run_role(RunDir(tmp_path / "run"), "main", "env_server-0")
    assert code == ExitCode.CONFIG
    assert "environment reverse-text has a judge without an address" in log
    assert f"no renderer is known for model {model}" in log.splitlines()[-1]


def test_an_unknown_environment_ends_the_server_with_its_name(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "model")
    recipe["environments"]["train"][0]["id"] = "no-such-env"
    make_plan(tmp_path / "run", recipe, processes=[process_plan(Role.ENV_SERVER)])
    code, log = run_role(RunDir(tmp_path / "run"), "main", "env_server-0")
    assert code == ExitCode.CONFIG
    assert "environment no-such-env" in log.splitlines()[-1]
    assert "Traceback" not in log
