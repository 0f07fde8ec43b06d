"""Environments: what a recipe's block becomes, what reverse-text gives, and how the in-process harness survives faults."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from primerl_hpc.common.errors import ConfigError, DataError, NotFoundError
from primerl_hpc.envs import expose_shipped
from primerl_hpc.envs.config import environment_config, environment_of
from primerl_hpc.envs.tasks import load_tasks, resolve_environment
from primerl_hpc.recipe.rollout_schema import Environment
from primerl_hpc.recipe.schema import Recipe
from tests.api import Request, chat_completion, serve
from tests.support import ROOT


def reverse_text(**args) -> Environment:
    return Environment(id="reverse-text", args=args)


# -- configuration ------------------------------------------------------------------------------------------------------


def test_runtime_and_harness_are_always_named() -> None:
    config = environment_config(reverse_text(split="test"))
    assert config == {
        "taskset": {"id": "reverse-text", "split": "test"},
        "agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "inproc-chat"}},
    }


def test_env_args_go_over_single_keys_and_leave_the_rest() -> None:
    environment = Environment(
        id="x", env_args={"agent": {"max_turns": 4, "harness": {"max_retries": 1}}, "timeout": {"episode": 9}}
    )
    config = environment_config(environment)
    assert config["agent"] == {
        "runtime": {"type": "subprocess"},
        "harness": {"id": "inproc-chat", "max_retries": 1},
        "max_turns": 4,
    }
    assert config["timeout"] == {"episode": 9}


def test_configs_are_made_without_loading_verifiers() -> None:
    code = (
        "import sys; from primerl_hpc.envs.config import environment_config\n"
        "from primerl_hpc.recipe.rollout_schema import Environment\n"
        "environment_config(Environment(id='reverse-text')); sys.exit('verifiers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_environment_servers_are_numbered_train_first_then_eval() -> None:
    environments = {
        "train": [{"id": "a", "servers": 2}, {"id": "b"}],
        "eval": [{"id": "a", "name": "held-out"}],
    }
    recipe = Recipe.model_validate(
        {"kind": "rl", "name": "r", "model": {"name": "m"}, "max_steps": 1, "environments": environments}
    )
    found = [(split, environment.label) for split, environment in recipe.environments.by_server]
    assert found == [("train", "a"), ("train", "a"), ("train", "b"), ("eval", "held-out")]
    assert environment_of(recipe, 3)[1].label == "held-out"
    with pytest.raises(NotFoundError):
        environment_of(recipe, 4)


def test_verifiers_takes_the_config_as_it_is() -> None:
    config = resolve_environment(Environment(id="reverse-text", env_args={"agent": {"max_turns": 3}}))
    assert config.agent.runtime.type == "subprocess"
    assert config.agent.harness.id == "inproc-chat"
    assert config.agent.max_turns == 3


@pytest.mark.parametrize(
    ("environment", "cause"),
    [
        (Environment(id="no-such-env"), "found no module 'no_such_env'"),
        (Environment(id="reverse-text", args={"splt": "test"}), r"taskset\.splt"),
        (Environment(id="reverse-text", args={"split": "dev"}), r"taskset\.split"),
        (Environment(id="reverse-text", env_args={"agent": {"max_turn": 1}}), r"agent\.max_turn"),
        (Environment(id="json"), "exports no Taskset"),
    ],
)
def test_a_wrong_environment_is_refused_with_its_name_and_the_cause(
    environment: Environment, cause: str
) -> None:
    with pytest.raises(ConfigError, match=cause) as caught:
        load_tasks(environment)
    assert environment.label in str(caught.value)


def test_an_environment_that_raises_while_loading_is_named(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "broken_env.py").write_text(
        "import verifiers.v1 as vf\n"
        "class Broken(vf.Taskset[vf.Task, vf.TasksetConfig]):\n"
        "    def load(self):\n        raise FileNotFoundError('rows.jsonl')\n"
        "__all__ = ['Broken']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(DataError, match=r"environment broken-env: .*rows\.jsonl"):
        load_tasks(Environment(id="broken-env"))


def test_an_installed_package_wins_over_a_shipped_one(tmp_path: Path) -> None:
    (tmp_path / "reverse_text.py").touch()
    code = (
        "from primerl_hpc.envs import expose_shipped; expose_shipped(); expose_shipped()\n"
        "from importlib.util import find_spec\n"
        "assert find_spec('inproc_chat'); print(find_spec('reverse_text').origin)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )
    assert done.stdout.strip() == str(tmp_path / "reverse_text.py")


# -- reverse-text -------------------------------------------------------------------------------------------------------


def test_train_and_test_share_no_word_whatever_the_seeds() -> None:
    train = {task.key for seed in (0, 1) for task in load_tasks(reverse_text(seed=seed))}
    test = {task.key for seed in (0, 1) for task in load_tasks(reverse_text(split="test", seed=seed))}
    assert len(train) > 8192
    assert not train & test


def test_tasks_are_the_same_in_every_run_and_keys_do_not_depend_on_position() -> None:
    first, again = (load_tasks(reverse_text(num_tasks=50)) for _ in range(2))
    assert first == again
    more = load_tasks(reverse_text(num_tasks=80))
    assert [task.key for task in more[:50]] == [task.key for task in first]
    assert load_tasks(reverse_text(num_tasks=50), limit=3) == first[:3]


def test_the_answer_is_the_word_reversed_within_the_lengths() -> None:
    for task in load_tasks(reverse_text(num_tasks=200, min_len=5, max_len=6)):
        assert task.data["answer"] == task.data["prompt"][::-1]
        assert 5 <= len(task.data["prompt"]) <= 6


def test_more_words_than_there_are_is_an_error_and_not_an_endless_loop() -> None:
    with pytest.raises(DataError, match="no 100 different train words of 1 to 1 letters"):
        load_tasks(reverse_text(num_tasks=100, min_len=1, max_len=1))


@pytest.mark.parametrize(
    ("reply", "similarity", "exact"),
    [("olleh", 1.0, 1.0), (" olleh\n", 1.0, 1.0), ("hello", 0.4, 0.0), ("", 0.0, 0.0), ("olle", 8 / 9, 0.0)],
)
def test_the_reward_is_the_similarity_to_the_answer(reply: str, similarity: float, exact: float) -> None:
    expose_shipped()
    import reverse_text as module

    class Trace:
        last_reply = reply

    task = module.ReverseTextTask(module.ReverseTextData(prompt="hello", answer="olleh"))
    assert asyncio.run(task.similarity(Trace())) == pytest.approx(similarity)
    assert asyncio.run(task.exact_match(Trace())) == exact


# -- the in-process harness against a server that misbehaves --------------------------------------------------------------


@contextmanager
def chat_server(script: list[int | None]) -> Iterator[tuple[str, list[dict]]]:
    """Answers with the statuses of ``script``, None: hang up; then always 200. Yields URL and the requests it saw."""
    seen: list[dict] = []

    def answer(request: Request) -> tuple[int, dict] | None:
        seen.append({"retry": request.headers.get("x-stainless-retry-count"), **request.body})
        status = script.pop(0) if script else 200
        return None if status is None else (status, chat_completion({"content": "ok"}))

    with serve(answer) as url:
        yield url, seen


def launch(url: str, **config):
    expose_shipped()
    import inproc_chat
    import verifiers.v1 as vf
    from verifiers.v1.configs.client import EvalClientConfig

    harness = inproc_chat.InprocChatHarness(inproc_chat.InprocChatConfig(**config))
    context = vf.ModelContext(model="m", client=EvalClientConfig(api_key_var="NO_KEY"))
    data = vf.TaskData(prompt="hi", system_prompt="be kind")
    return asyncio.run(harness.launch(context, None, None, url, "secret", {}, data))


def test_the_harness_repeats_a_call_after_a_refusal_and_after_a_broken_connection() -> None:
    with chat_server([503, None, 429]) as (url, seen):
        result = launch(url)
    assert result.exit_code == 0
    assert [request["retry"] for request in seen] == [None, "1", "2", "3"]
    assert seen[0]["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
    ]


def test_the_harness_gives_up_after_its_retries_with_the_servers_words() -> None:
    with chat_server([500, 500, 500]) as (url, seen):
        result = launch(url, max_retries=1)
    assert (result.exit_code, len(seen)) == (1, 2)
    assert "HTTP 500" in result.stderr


def test_a_refused_turn_is_not_repeated() -> None:
    with chat_server([400]) as (url, seen):
        result = launch(url)
    assert (result.exit_code, len(seen)) == (1, 1)
