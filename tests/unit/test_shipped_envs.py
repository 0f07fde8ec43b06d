"""The shipped environments, played through verifiers by a scripted model behind a chat-completions server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from primerl_hpc.cli.main import cli
from primerl_hpc.common.errors import DataError
from primerl_hpc.envs.check import check_environment
from primerl_hpc.envs.tasks import load_tasks
from primerl_hpc.recipe.rollout_schema import Environment
from tests.api import Request, chat_completion, serve

Model = Callable[[dict], dict]


@contextmanager
def scripted(model: Model) -> Iterator[str]:
    """A server whose replies are ``model(request)``: a message, or a status in ``{"status": 400}``. Yields its URL."""

    def answer(request: Request) -> tuple[int, dict]:
        if not request.body:
            return 200, {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 512}]}
        message = model(request.body)
        return message.get("status", 200), chat_completion(message)

    with serve(answer) as url:
        yield f"{url}/v1"


def play(model: Model, environment_id: str, *, env_args: dict | None = None, **args) -> dict[str, dict]:
    """One rollout of the first task; its traces by agent."""
    environment = Environment(id=environment_id, args=args, env_args=env_args or {})
    with scripted(model) as url:
        report = check_environment(environment, url=url, model="m", key_variable="NO_KEY")
    return {trace["agent"]: trace for trace in report.rollout["traces"]}


def names_in(messages: list[dict]) -> list[str]:
    return [
        name
        for message in messages
        if message["role"] == "user"
        for name in message["content"].split(": ")[1].split()
    ]


# -- alphabet-sort ------------------------------------------------------------------------------------------------------


def sort_all(request: dict) -> dict:
    return {"content": " ".join(sorted(names_in(request["messages"])))}


def test_alphabet_sort_gives_names_turn_by_turn_and_rewards_who_keeps_them_sorted():
    trace = play(sort_all, "alphabet-sort", turns=3)["agent"]
    assert (trace["turns"], trace["rewards"]) == (3, {"similarity": 1.0})
    assert [message["role"] for message in trace["messages"]] == ["user", "assistant"] * 3


def test_alphabet_sort_counts_turns_that_were_not_reached_as_wrong():
    trace = play(sort_all, "alphabet-sort", turns=4, env_args={"agent": {"max_turns": 1}})["agent"]
    assert trace["rewards"] == {"similarity": 0.25}


@pytest.mark.parametrize("environment_id", ["alphabet-sort", "calculator", "nim"])
def test_train_and_test_share_no_task_and_are_the_same_in_every_run(environment_id):
    split = {}
    for name in ("train", "test"):
        environment = Environment(id=environment_id, args={"split": name})
        tasks = load_tasks(environment)
        assert tasks == load_tasks(environment)
        split[name] = {task.key for task in tasks}
    assert split["train"] and split["test"] and not split["train"] & split["test"]


# -- calculator ---------------------------------------------------------------------------------------------------------


def use_tools(request: dict) -> dict:
    """Multiplies by the tool, adds by the tool, says the number."""
    assert {tool["function"]["name"] for tool in request["tools"]} == {"add", "multiply"}
    a, b, c = map(int, re.findall(r"\d+", request["messages"][0]["content"])[:3])
    results = [message["content"] for message in request["messages"] if message["role"] == "tool"]
    steps = [("multiply", {"a": a, "b": b}), ("add", {"a": results and int(results[0]), "b": c})]
    if len(results) == 2:
        return {"content": f"The result is {results[1]}."}
    name, arguments = steps[len(results)]
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"tool_calls": [{"id": f"call-{len(results)}", "type": "function", "function": function}]}


def test_calculator_calls_reach_the_tool_server_and_the_number_is_judged():
    trace = play(use_tools, "calculator", num_tasks=2)["agent"]
    assert (trace["turns"], trace["rewards"]) == (3, {"correct": 1.0})


# -- nim ----------------------------------------------------------------------------------------------------------------


def take(moves: Callable[[int], int]) -> Model:
    def model(request: dict) -> dict:
        stones = int(re.findall(r"(\d+) stones", request["messages"][-1]["content"])[-1])
        return {"content": f"I take {moves(stones)}"}

    return model


def test_nim_is_played_by_both_seats_to_the_last_stone():
    traces = play(take(lambda stones: 1), "nim", min_stones=5, max_stones=5)
    assert {agent: trace["rewards"]["win"] for agent, trace in traces.items()} == {
        "first": 1.0,
        "second": -1.0,
    }
    assert (traces["first"]["turns"], traces["second"]["turns"]) == (3, 2)


def test_nim_loses_at_once_who_takes_what_is_not_allowed():
    traces = play(take(lambda stones: 1 if stones > 4 else 9), "nim", min_stones=5, max_stones=5)
    assert {agent: trace["rewards"]["win"] for agent, trace in traces.items()} == {
        "first": 1.0,
        "second": -1.0,
    }


def test_nim_is_lost_by_an_opening_that_is_not_allowed_though_nobody_else_moved():
    traces = play(take(lambda stones: 9), "nim", min_stones=5, max_stones=5)
    assert {agent: trace["rewards"]["win"] for agent, trace in traces.items()} == {
        "first": -1.0,
        "second": 1.0,
    }
    assert traces["second"]["turns"] == 0


# -- env check ----------------------------------------------------------------------------------------------------------


def run(*words: str):
    return CliRunner().invoke(cli, ["env", *words], catch_exceptions=True)


def test_env_check_loads_an_environment_and_shows_its_tasks():
    done = run("check", "alphabet-sort", "--arg", "num_tasks=7", "--json")
    report = json.loads(done.output)
    assert (report["num_tasks"], report["agents"], report["rollout"]) == (7, ["agent"], None)


def test_env_check_runs_one_task_where_it_is_told():
    with scripted(sort_all) as url:
        done = run("check", "alphabet-sort", "--url", url, "--model", "m", "--arg", "turns=2")
    assert done.exit_code == 0, done.output
    assert "similarity 1 after 2 turns" in done.output


def test_env_check_says_that_the_recipe_needs_a_judge_and_has_the_model_judge_itself(tmp_path):
    words = ("check", "reverse-text", "--arg", "task={judges: [{id: reference}]}")
    assert "judge: {model" in run(*words).output
    with scripted(lambda request: {"content": "yes"}) as url:
        done = run(*words, "--url", url, "--model", "m", "--json")
    report = json.loads(done.output)
    assert report["needs_judge"] and report["rollout"]["traces"][0]["rewards"]["reference"] == 1
    own = "task={judges: [{id: reference, base_url: 'http://judge/v1'}]}"
    report = json.loads(run("check", "reverse-text", "--arg", own, "--json").output)
    assert not report["needs_judge"] and not report["warnings"]


BROKEN = """
import verifiers.v1 as vf
class Task(vf.Task[vf.TaskData]):
    {reward}
class Broken(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        {load}
__all__ = ["Broken"]
"""
ONE_TASK = "yield Task(vf.TaskData(prompt='hi'), self.config.task)"
REWARDS = {
    "no reward": ("pass", "agent got no reward"),
    "nan": (
        "@vf.reward(weight=1.0)\n    async def good(self, trace: vf.Trace) -> float: return float('nan')",
        "good",
    ),
    "raises": (
        "@vf.reward(weight=1.0)\n    async def good(self, trace: vf.Trace) -> float: raise KeyError('answer')",
        "answer",
    ),
}


def broken(folder: Path, monkeypatch, name: str, reward: str, load: str = ONE_TASK) -> Environment:
    module = f"broken_{name.replace(' ', '_')}"
    (folder / f"{module}.py").write_text(BROKEN.format(reward=reward, load=load))
    monkeypatch.syspath_prepend(str(folder))
    return Environment(id=module.replace("_", "-"))


@pytest.mark.parametrize("name", REWARDS)
def test_a_rollout_without_a_reward_is_named_with_environment_and_task(tmp_path, monkeypatch, name):
    reward, cause = REWARDS[name]
    environment = broken(tmp_path, monkeypatch, name, reward)
    with (
        scripted(lambda request: {"content": "hello"}) as url,
        pytest.raises(DataError, match=cause) as caught,
    ):
        check_environment(environment, url=url, model="m", key_variable="NO_KEY")
    assert caught.value.place.startswith(f"environment {environment.label}, task ")


def test_an_environment_without_tasks_is_named(tmp_path, monkeypatch):
    environment = broken(tmp_path, monkeypatch, "empty", "pass", load="return iter(())")
    with pytest.raises(DataError, match="it has no tasks") as caught:
        load_tasks(environment)
    assert caught.value.place == "environment broken-empty"


def test_an_environment_that_hangs_is_given_up(tmp_path, monkeypatch):
    hang = "@vf.reward(weight=1.0)\n    async def good(self, trace: vf.Trace) -> float:\n        import asyncio\n        await asyncio.Event().wait()"
    environment = broken(tmp_path, monkeypatch, "hanging", hang)
    with (
        scripted(lambda request: {"content": "hello"}) as url,
        pytest.raises(DataError, match="no end after"),
    ):
        check_environment(environment, url=url, model="m", key_variable="NO_KEY", timeout_s=2.0)


def test_a_server_that_refuses_is_told_with_its_status():
    with scripted(lambda request: {"status": 400}) as url, pytest.raises(DataError, match="ProviderError"):
        check_environment(Environment(id="reverse-text"), url=url, model="m", key_variable="NO_KEY")


def test_env_install_puts_a_package_where_it_is_told(tmp_path):
    package = tmp_path / "package"
    (package / "tiny_env").mkdir(parents=True)
    (package / "tiny_env" / "__init__.py").write_text("")
    (package / "setup.py").write_text(
        "from setuptools import setup; setup(name='tiny-env', version='1', packages=['tiny_env'])"
    )
    target = tmp_path / "target"
    done = run(
        "install", str(package), "--target", str(target), "--", "--no-build-isolation", "--no-deps", "-q"
    )
    assert done.exit_code == 0, done.output
    assert (target / "tiny_env" / "__init__.py").is_file()
    assert "env check" in done.output


def test_env_install_says_when_pip_could_not():
    done = run("install", "/no/such/folder", "--", "-q")
    assert "pip could not install /no/such/folder" in str(done.exception)
