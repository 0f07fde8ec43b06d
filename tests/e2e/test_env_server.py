"""A real environment server: rollouts through verifiers' train client with a real engine, crashes, timeouts,
shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from transformers import AutoTokenizer
from verifiers.v1.types import SamplingConfig

from primerl_hpc.common import env
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json
from primerl_hpc.common.names import Role
from primerl_hpc.envs.config import environment_of
from primerl_hpc.envs.tasks import EnvironmentTask, load_tasks
from primerl_hpc.orchestrator.rollout_data import Rollout, RolloutFailed
from primerl_hpc.orchestrator.rollouts.distillation import Distillation
from primerl_hpc.orchestrator.rollouts.env_client import (
    EnvServerClient,
    EnvServerDied,
    EnvServerError,
    external_client,
    external_sampling_config,
    sampling_config,
    train_client,
)
from primerl_hpc.orchestrator.rollouts.env_pool import EnvServerPool
from primerl_hpc.orchestrator.rollouts.environments import EnvHandle
from primerl_hpc.orchestrator.rollouts.self_teacher import demonstrated_prompt
from primerl_hpc.orchestrator.rollouts.teacher import TeacherClient, add_samples
from primerl_hpc.orchestrator.rollouts.trajectories import role_tokens, rollout_of
from primerl_hpc.recipe.renderer import make_renderer
from primerl_hpc.recipe.schema.algorithm import OPSD
from primerl_hpc.recipe.schema.evaluation import External
from primerl_hpc.recipe.schema.model import Teacher
from primerl_hpc.recipe.schema.rollout import Sampling
from primerl_hpc.roles.scratch import scratch_path
from primerl_hpc.run.endpoints import publish_endpoint, read_endpoint
from primerl_hpc.run.rundir import RunDir
from tests.support.api import Request, chat_completion, serve
from tests.support.helpers import (
    PATIENCE_S,
    ROOT,
    end_role,
    make_plan,
    make_tiny_model,
    process_plan,
    run_role,
    start_role,
    wait_for_async,
)
from tests.support.serving import Serving, hf_logprobs, make_recipe

pytestmark = pytest.mark.e2e


def chat_client(router_url: str) -> Any:
    """Use chat completions instead of token ids."""
    return external_client(External(base_url=f"{router_url}/v1", key_variable=env.ENGINE_API_KEY))


class Rollouts:
    """A client and tasks, to run rollouts."""

    def __init__(self, serving: Serving, server: int = 0) -> None:
        self.serving, self.recipe = serving, serving.recipe
        _, self.environment = environment_of(self.recipe, server)
        self.tasks: list[EnvironmentTask] = load_tasks(self.environment, limit=8)
        self.client = EnvServerClient(serving.run, f"env_server-{server}", self.environment, poll_s=0.02)

    def run(self, number: int = 0, *, timeout_s: float = PATIENCE_S, evaluate: bool = False) -> Awaitable:
        url = self.serving.url("router-0")
        how = chat_client(url) if evaluate else train_client(self.recipe.model, url)
        sampling = sampling_config(self.recipe.rollouts.sampling, 0)
        return self.client.run(self.tasks[number].data, how, self.recipe.model.name, sampling, timeout_s)

    async def until_at_engine(self, count: int) -> None:
        """Wait until the engine has this many requests without a response."""
        async with self.serving.async_client() as client:

            async def is_reached() -> bool:
                load = (await client.get(f"{self.serving.url('inference-0')}/load")).json()
                return load["server_load"] == count

            await wait_for_async(is_reached, f"{count} requests at the engine")

    async def stuck(self, *rollouts: Awaitable) -> list[asyncio.Future]:
        """Start rollouts; return them when each has a request at the paused engine."""
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
            await rollouts.client.wait_ready(PATIENCE_S)
            await check(rollouts)
        finally:
            await rollouts.client.close()

    asyncio.run(main())


def test_a_rollout_has_the_tokens_and_logprobs_of_the_engine(serving: Serving) -> None:
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


def test_an_episode_arrives_in_one_message_after_the_rollout(serving: Serving) -> None:
    async def check(rollouts: Rollouts) -> None:
        await rollouts.run()  # connects
        deltas: list[dict[str, Any]] = []
        episode = await rollouts.client._client.run(
            client=train_client(rollouts.recipe.model, serving.url("router-0")),
            model=rollouts.recipe.model.name,
            sampling=sampling_config(rollouts.recipe.rollouts.sampling, 0),
            task_data=rollouts.tasks[0].data,
            on_delta=deltas.append,
        )
        (trace,) = episode.traces
        assert [delta["trace"] for delta in deltas] == [trace.id]
        assert len(deltas[0]["nodes"]) == len(trace.nodes) > 1

    with_rollouts(serving, check)


def test_without_max_tokens_a_turn_may_use_the_rest_of_the_context(serving: Serving) -> None:
    async def check(rollouts: Rollouts) -> None:
        sampling = sampling_config(Sampling(max_tokens=None), 0).model_dump(exclude_none=True)
        endless = SamplingConfig.model_validate({**sampling, "allowed_token_ids": [5, 6]})  # no end of turn
        how = train_client(rollouts.recipe.model, rollouts.serving.url("router-0"))
        episode = await rollouts.client.run(rollouts.tasks[0].data, how, rollouts.recipe.model.name, endless)
        (trace,) = episode.traces
        assert len(trace.branches[0].token_ids) == rollouts.recipe.max_model_len and trace.is_truncated

    with_rollouts(serving, check)


def test_an_evaluation_rollout_is_scored(serving: Serving) -> None:
    async def check(rollouts: Rollouts) -> None:
        episode = await rollouts.run(evaluate=True)
        assert episode.ok, episode.errors
        assert "similarity" in episode.traces[0].rewards

    with_rollouts(serving, check)


def test_invalid_task_data_is_an_error_and_the_server_continues(serving: Serving) -> None:
    async def check(rollouts: Rollouts) -> None:
        rollouts.tasks[0].data.pop("answer")
        with pytest.raises(EnvServerError, match="answer"):
            await rollouts.run(0)
        assert rollouts.client.is_up
        assert (await rollouts.run(1)).ok

    with_rollouts(serving, check)


def test_sigkill_fails_pending_rollouts_and_the_next_ones_run_on_the_successor(serving: Serving) -> None:
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


def test_a_frozen_server_is_abandoned_and_a_restart_is_requested(serving: Serving) -> None:
    async def check(rollouts: Rollouts) -> None:
        rollouts.client.health_s = 1.0
        frozen, request = serving.processes["env_server-0"].pid, serving.run.restart_request("env_server-0")
        life = read_endpoint(serving.run, "env_server-0")["incarnation"]
        os.killpg(frozen, signal.SIGSTOP)
        try:
            with pytest.raises(EnvServerDied):
                await rollouts.run()
            asked = read_json(request)
            assert asked["incarnation"] == life and "did not respond" in asked["reason"]
        finally:
            rollouts.client.health_s = 300.0
            request.unlink(missing_ok=True)
            os.killpg(frozen, signal.SIGCONT)
        assert (await rollouts.run()).ok  # a server that recovered without a restart would be used again

    with_rollouts(serving, check)


def test_a_rollout_that_times_out_or_is_cancelled_ends_at_the_engine(serving: Serving) -> None:
    async def check(rollouts: Rollouts) -> None:
        await rollouts.run()  # so that the next one's time is not spent on loading the tokenizer
        try:
            late, cancelled = await rollouts.stuck(rollouts.run(0, timeout_s=20.0), rollouts.run(1))
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


def test_a_prompt_longer_than_the_context_fails_only_its_rollout(serving: Serving) -> None:
    async def check(rollouts: Rollouts) -> None:
        rollouts.tasks[0].data["prompt"] = "x" * 2000
        episode = await rollouts.run(0)
        with pytest.raises(RolloutFailed, match=r"ProviderError: .*[Pp]rompt length") as caught:
            rollout_of(episode, temperature=1.0)
        assert not caught.value.is_engine_fault
        assert (await rollouts.run(1)).ok

    with_rollouts(serving, check)


FOREIGN_SERVER = """
import sys
from primerl_hpc.envs.tasks import resolve_environment
from primerl_hpc.recipe.schema.rollout import Environment
from verifiers.v1.serve import serve_env

class Address:
    def put(self, address):
        print(address, flush=True)

config = resolve_environment(Environment.model_validate_json(sys.argv[1]))
serve_env(max_workers=1, address="tcp://127.0.0.1:0", address_queue=Address(), config=config)
"""


@pytest.fixture(scope="module")
def foreign_server(serving: Serving) -> Iterator[str]:
    """Address of verifiers' own server, started outside the run. It has the certificate and key of the run's router."""
    _, environment = environment_of(serving.recipe, 0)
    trust = {"SSL_CERT_FILE": str(serving.keys.authority), env.ENGINE_API_KEY: serving.keys.api_key}
    served = environment.model_dump_json(include={"id", "args", "env_args"})
    command = [sys.executable, "-c", FOREIGN_SERVER, served]
    with subprocess.Popen(command, env={**os.environ, **trust}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


def test_a_server_by_address_is_used_without_being_published(serving: Serving, foreign_server: str) -> None:
    async def check() -> None:
        rollouts = Rollouts(serving)
        environment = rollouts.environment.model_copy(update={"address": foreign_server})
        rollouts.client = EnvServerClient(serving.run, "env_server-9", environment, poll_s=0.02)
        try:
            assert (await rollouts.run()).ok
        finally:
            await rollouts.client.close()

    asyncio.run(check())


def test_closing_ends_when_a_response_arrives_at_the_same_time(serving: Serving, foreign_server: str) -> None:
    async def check() -> None:
        rollouts = Rollouts(serving)
        environment = rollouts.environment.model_copy(update={"address": foreign_server})
        client = EnvServerClient(serving.run, "env_server-9", environment, poll_s=0.02)
        await client.wait_ready(PATIENCE_S)
        questions = client._client._pending  # verifiers keeps them by request
        while not questions:
            await asyncio.sleep(0)
        next(iter(questions.values())).set_result(msgpack.packb({"success": True}))
        closing = asyncio.create_task(client.close())
        # from outside: a limit around it is a cancellation as well
        await asyncio.wait({closing}, timeout=PATIENCE_S)
        assert closing.done()

    asyncio.run(check())


def test_a_server_that_joins_its_pool_late_gets_its_share_of_rollouts(serving: Serving) -> None:
    async def check() -> None:
        rollouts = Rollouts(serving)
        late = EnvServerClient(serving.run, "env_server-9", rollouts.environment, poll_s=0.02)
        rollouts.client = pool = EnvServerPool([late, rollouts.client])
        all_ready = asyncio.create_task(pool.wait_ready(PATIENCE_S))
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


def test_a_teacher_with_the_same_weights_has_the_log_probabilities_of_the_policy(
    serving: Serving, monkeypatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", serving.keys.api_key)
    monkeypatch.setenv("SSL_CERT_FILE", str(serving.keys.authority))
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


def test_a_teachers_reply_becomes_tokens_of_the_policys_template(serving: Serving) -> None:
    async def check(rollouts: Rollouts) -> None:
        episode = await rollouts.run(evaluate=True)  # chat completions: text, no tokens
        rollout = rollout_of(episode, temperature=1.0, need_tokens=False)
        tokenizer = AutoTokenizer.from_pretrained(serving.model)
        add_samples(rollout, episode, make_renderer(serving.recipe.model, tokenizer))
        (sample,) = rollout.samples
        (prompt,) = rollout_of(await rollouts.run(), temperature=1.0).samples
        length = int(np.flatnonzero(prompt.loss_mask)[0])
        assert sample.token_ids[:length].tolist() == prompt.token_ids[:length].tolist()
        assert not sample.loss_mask[:length].any()
        text = tokenizer.decode(sample.token_ids[sample.loss_mask])
        (played,) = episode.traces
        end = "" if played.calls[-1].finish_reason == "length" else "<|im_end|>"
        assert text == played.nodes[-1].message.content + end

    with_rollouts(serving, check)


def test_the_policy_with_a_demonstration_scores_tokens_sampled_without_it(serving: Serving) -> None:
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


def test_a_server_that_does_not_restart_is_reported(serving: Serving) -> None:
    async def check() -> None:
        environment = serving.recipe.environments.train[0]
        client = EnvServerClient(serving.run, "env_server-9", environment, poll_s=0.02, restart_timeout_s=0.1)
        sampling = sampling_config(serving.recipe.rollouts.sampling, 0)
        with pytest.raises(EnvServerDied, match="reverse-text"):
            await client.run({}, chat_client("http://127.0.0.1:1"), "m", sampling)
        await client.close()

    asyncio.run(check())


def test_the_evaluation_server_queries_the_judge_and_leaves_no_files(serving: Serving) -> None:
    """The engine is also the judge, with random replies."""
    shutil.copy(serving.run.endpoint("inference-0"), serving.run.endpoint("judge-0"))
    serving.start("env_server-1")

    async def check(rollouts: Rollouts) -> None:
        with pytest.raises(RolloutFailed, match=r"TaskError: .*judge returned no correct/incorrect verdict"):
            rollout_of(await rollouts.run(), temperature=1.0)
        other = Rollouts(serving).client
        rollouts.client = EnvServerPool([other, rollouts.client])
        await rollouts.client.wait_ready(PATIENCE_S)
        episodes = await asyncio.gather(rollouts.run(), rollouts.run())
        # each had one; the other asks no judge
        assert sorted(episode.ok for episode in episodes) == [False, True]
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


@pytest.mark.slow
def test_a_judge_that_restarts_at_another_address_is_queried_there(tmp_path: Path) -> None:
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
        how = external_client(External(base_url=f"{policy}/v1", key_variable=env.NO_KEY))
        sampling = external_sampling_config(recipe.rollouts.sampling)
        try:
            await client.wait_ready(PATIENCE_S)
            with pytest.raises(RolloutFailed, match="no correct/incorrect verdict"):
                episode = await client.run(task.data, how, "m", sampling, PATIENCE_S)
                rollout_of(episode, temperature=1.0, need_tokens=False)
            publish_endpoint(run, "judge-0", successor)
            episodes = []

            async def is_judged() -> bool:
                episodes.append(await client.run(task.data, how, "m", sampling, PATIENCE_S))
                return episodes[-1].ok

            await wait_for_async(is_judged, "the judge that came back elsewhere")
            episode = episodes[-1]
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


def test_tool_results_are_tokens_and_only_tokens_of_the_policy_are_trained(tmp_path: Path) -> None:
    """The engine is simulated: it calls the tool to multiply, calls it to add, and replies with the number."""
    model, run = make_tiny_model(tmp_path / "tiny", rows=1, hidden=32, layers=1) / "model", RunDir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": QWEN3_TOKENS})
    tokenizer.save_pretrained(model)
    recipe = make_recipe(model) | {"seq_len": 4096, "inference": {"max_model_len": 4096}}
    recipe["model"]["renderer"] = {"name": "qwen3"}
    recipe["environments"] = {"train": [{"id": "calculator", "args": {"num_tasks": 1}}]}
    recipe["rollouts"]["sampling"] = {"max_tokens": None}
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
        # the engine gives each turn the rest of the context, which the client must not bound
        assert "max_tokens" not in request.body["sampling_params"]
        prompts.append(request.body["token_ids"])
        reply = replies[len(prompts) - 1]
        content = [{"token": f"token_id:{token}", "logprob": -0.5} for token in reply]
        choice = {"index": 0, "token_ids": reply, "finish_reason": "stop", "logprobs": {"content": content}}
        return 200, {"request_id": "r", "choices": [choice]}

    async def play(url: str) -> Rollout:
        client = EnvServerClient(run, "env_server-0", environment, poll_s=0.02)
        try:
            await client.wait_ready(PATIENCE_S)
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


def test_a_template_without_a_renderer_ends_the_server_and_the_error_names_the_model(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", rows=1, hidden=32, layers=1) / "model"
    recipe = make_recipe(model)
    recipe["model"]["renderer"] = {"name": "auto"}
    make_plan(tmp_path / "run", recipe, processes=[process_plan(Role.ENV_SERVER)])
    code, log = run_role(RunDir(tmp_path / "run"), "main", "env_server-0")
    assert code == ExitCode.CONFIG
    assert f"no renderer is known for model {model}" in log.splitlines()[-1]


@pytest.mark.slow
def test_tools_with_a_renderer_that_has_none_end_the_server_with_an_error(tmp_path: Path) -> None:
    recipe = make_recipe(make_tiny_model(tmp_path / "tiny", rows=1, hidden=32, layers=1) / "model")
    recipe["environments"]["train"] = [{"id": "calculator"}]
    make_plan(tmp_path / "run", recipe, processes=[process_plan(Role.ENV_SERVER)])
    code, log = run_role(RunDir(tmp_path / "run"), "main", "env_server-0")
    assert code == ExitCode.CONFIG
    assert "environment calculator: the environment has tools, but renderer 'chatml'" in log.splitlines()[-1]


ECHO = {
    "pyproject.toml": '[project]\nname = "echo-tools"\nversion = "0.1.0"\n',
    "echo_tools/__init__.py": 'from echo_tools.taskset import Echo\n\n__all__ = ["Echo"]\n',
    "echo_tools/server.py": """
import verifiers.v1 as vf

class EchoToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "echo"

    @vf.tool
    def echo(self, text: str) -> str:
        return text

if __name__ == "__main__":
    EchoToolset.run()
""",
    "echo_tools/taskset.py": """
import verifiers.v1 as vf

from echo_tools.server import EchoToolset

class EchoTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()

class EchoTask(vf.Task[vf.TaskData, vf.State, EchoTaskConfig]):
    @classmethod
    def toolsets(cls, config: EchoTaskConfig) -> list[vf.Toolset]:
        return [EchoToolset(config.tools)]

    @vf.reward(weight=1.0)
    async def done(self, trace: vf.Trace) -> float:
        return 1.0

class EchoConfig(vf.TasksetConfig):
    task: EchoTaskConfig = EchoTaskConfig()

class Echo(vf.Taskset[EchoTask, EchoConfig]):
    def load(self) -> list[EchoTask]:
        return [EchoTask(vf.TaskData(prompt="echo x"), self.config.task)]
""",
}
"""An environment as `vf-init` creates it, with a tool server for each task."""


@pytest.mark.slow
def test_episodes_that_start_tool_servers_are_limited_to_one_per_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node has one core; without the limit, all tool servers would start before the first one responds."""
    for name, text in ECHO.items():
        path = tmp_path / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "package"))
    run = RunDir(tmp_path / "run")
    model = make_tiny_model(tmp_path / "tiny", rows=1, hidden=32, layers=1) / "model"
    block = make_recipe(model) | {"environments": {"train": [{"id": "echo-tools"}]}}
    block["model"]["renderer"] = {"name": "default", "options": {"tool_parser": "qwen3"}}
    recipe = make_plan(run.root, block, processes=[process_plan(Role.ENV_SERVER)]).phases[0].recipe
    (environment,) = recipe.environments.train
    (task,) = load_tasks(environment)
    at_once: list[int] = []

    def model_says(_: Request) -> tuple[int, dict]:
        at_once.append(len(tool_servers(run)))
        return 200, chat_completion({"content": "x"})

    async def play(url: str) -> list[Any]:
        client = EnvServerClient(run, "env_server-0", environment, poll_s=0.02)
        how = external_client(External(base_url=f"{url}/v1", key_variable=env.NO_KEY))
        try:
            await client.wait_ready(PATIENCE_S)
            (published,) = client.published_endpoints
            assert (published["processes"], published["cores"]) == (["tool server echo"], 1)
            sampling = external_sampling_config(recipe.rollouts.sampling)
            rollouts = [client.run(task.data, how, "m", sampling, PATIENCE_S) for _ in range(3)]
            return await asyncio.gather(*rollouts)
        finally:
            await client.close()

    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        server = start_role(run, "main", "env_server-0", PYTHONPATH=f"{tmp_path / 'package'}:{ROOT}")
    finally:
        os.sched_setaffinity(0, cores)
    try:
        with serve(model_says) as url:
            episodes = asyncio.run(play(url))
    finally:
        end_role(server)
    assert [episode.ok for episode in episodes] == [True] * 3 and at_once == [1] * 3
    log = (run.attempt_logs(1) / "env_server-0.log").read_text()
    assert log.count("starts 1 process for each episode (tool server echo)") == 1
    assert "at most 1 episodes run at a time" in log and "vf.SharedToolsetConfig" in log


def tool_servers(run: RunDir) -> list[int]:
    """Processes of the tool server, children of the environment server of ``run``."""
    pid, found = read_endpoint(run, "env_server-0")["pid"], []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and b"echo_tools.server" in (entry / "cmdline").read_bytes():
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                found += [int(entry.name)] if parent == pid else []
    return found


def test_an_unknown_environment_ends_the_server_and_the_error_names_it(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "model")
    recipe["environments"]["train"][0]["id"] = "no-such-env"
    make_plan(tmp_path / "run", recipe, processes=[process_plan(Role.ENV_SERVER)])
    code, log = run_role(RunDir(tmp_path / "run"), "main", "env_server-0")
    assert code == ExitCode.CONFIG
    assert "environment no-such-env" in log.splitlines()[-1]
    assert "Traceback" not in log


PULLS_AN_IMAGE = """
import asyncio, os, pathlib
from verifiers.v1.runtimes.apptainer import ApptainerConfig, ApptainerRuntime
from verifiers.v1.runtimes.subprocess import SubprocessConfig, SubprocessRuntime

async def use() -> list[str]:
    episode = SubprocessRuntime(SubprocessConfig())
    await episode.start()
    image = await ApptainerRuntime(ApptainerConfig(image="an/image:1"))._image()
    return [image, str(episode.workdir), os.environ["HOME"]]

with open(os.environ["USED"], "a") as file:
    print(*asyncio.run(use()), file=file)
raise ValueError("that was all")
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_writable", [True, False], ids=["home", "home that cannot be written"])
def test_an_image_is_pulled_once_across_restarts_and_episodes_use_the_scratch_folder(
    tmp_path: Path, is_writable: bool
) -> None:
    pulls, used, home, node = (tmp_path / name for name in ("pulls", "used", "home", "node"))
    for folder in (node, *((home,) if is_writable else ())):
        folder.mkdir()
    if not is_writable:
        home = Path("/proc/1")  # no user can create a folder there, not even root
    apptainer = tmp_path / "bin" / "apptainer"
    apptainer.parent.mkdir()
    apptainer.write_text(f'#!/bin/sh\n[ "$1" = pull ] && echo "$2" >>{pulls} && echo image >"$2"\n')
    apptainer.chmod(0o755)
    (tmp_path / "pulls_an_image.py").write_text(PULLS_AN_IMAGE)
    recipe = make_recipe(tmp_path / "model")
    recipe["environments"]["train"][0] = {"id": "pulls-an-image"}
    make_plan(tmp_path / "run", recipe, processes=[process_plan(Role.ENV_SERVER)])
    variables = {
        "HOME": str(home),
        "TMPDIR": str(node),
        "USED": str(used),
        "PATH": f"{apptainer.parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
    }
    for _ in range(2 if is_writable else 1):
        code, log = run_role(RunDir(tmp_path / "run"), "main", "env_server-0", **variables)
        assert code == ExitCode.CONFIG and "that was all" in log, log
    assert len(pulls.read_text().splitlines()) == 1
    for line in used.read_text().splitlines():
        image, episode, own_home = map(Path, line.split())
        assert image.exists() and image.is_relative_to(home if is_writable else node) and own_home == home
        assert not episode.exists() and episode.is_relative_to(node)
