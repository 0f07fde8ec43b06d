"""Environments: a recipe's block as a config, tasks of reverse-text, and the harness with a faulty server."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc import locate

import pytest

from primerl_hpc.common.errors import ConfigError, DataError, NotFoundError
from primerl_hpc.envs import expose_shipped
from primerl_hpc.envs.check import check_environment
from primerl_hpc.envs.config import environment_config, environment_of
from primerl_hpc.envs.processes import processes_of
from primerl_hpc.envs.tasks import load_tasks, resolve_environment
from primerl_hpc.envs.tools import WITHOUT_TOOLS, check_tools
from primerl_hpc.recipe.load import parse_recipe
from primerl_hpc.recipe.renderer import OWN_RENDERERS
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.rollout import Environment
from primerl_hpc.roles.env_server import home_for_caches
from tests.support.api import Request, chat_completion, serve
from tests.support.helpers import ROOT, captured


def reverse_text(**args) -> Environment:
    return Environment(id="reverse-text", args=args)


# -- configuration ---------------------------------------------------------------------------------


def test_runtime_and_harness_are_always_named() -> None:
    config = environment_config(reverse_text(split="test"))
    assert config == {
        "taskset": {"id": "reverse-text", "split": "test"},
        "agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "inproc-chat"}},
    }


def test_env_args_override_single_keys_only() -> None:
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


def test_configs_are_created_without_loading_verifiers() -> None:
    code = (
        "import sys; from primerl_hpc.envs.config import environment_config\n"
        "from primerl_hpc.recipe.schema.rollout import Environment\n"
        "environment_config(Environment(id='reverse-text')); sys.exit('verifiers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_environment_servers_are_numbered_train_first_then_eval() -> None:
    environments = {
        "train": [{"id": "a", "servers": 2}, {"id": "b"}],
        "eval": [{"id": "a", "name": "held-out"}],
    }
    recipe = parse_recipe(
        {"kind": "rl", "name": "r", "model": {"name": "m"}, "max_steps": 1, "environments": environments}
    )
    found = [(split, environment.label) for split, environment in recipe.environments.by_server]
    assert found == [("train", "a"), ("train", "a"), ("train", "b"), ("eval", "held-out")]
    assert environment_of(recipe, 3)[1].label == "held-out"
    with pytest.raises(NotFoundError):
        environment_of(recipe, 4)


def test_verifiers_accepts_the_config() -> None:
    config = resolve_environment(Environment(id="reverse-text", env_args={"agent": {"max_turns": 3}}))
    assert config.agent.runtime.type == "subprocess"
    assert config.agent.harness.id == "inproc-chat"
    assert config.agent.max_turns == 3


@pytest.mark.parametrize(
    ("environment", "cause"),
    [
        (Environment(id="no-such-env"), "failed: there is no module 'no_such_env'"),
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


SCAFFOLD = """
import verifiers.v1 as vf

class EchoTools(vf.Toolset[vf.{kind}ToolsetConfig]):
    @vf.tool
    def echo(self, text: str) -> str:
        return text

class EchoTaskConfig(vf.TaskConfig):
    tools: vf.{kind}ToolsetConfig = vf.{kind}ToolsetConfig()

class EchoTask(vf.Task[vf.TaskData, vf.State, EchoTaskConfig]):
    {task_tools}

    @vf.reward(weight=1.0)
    async def done(self, trace: vf.Trace) -> float:
        return 1.0

class EchoConfig(vf.TasksetConfig):
    task: EchoTaskConfig = EchoTaskConfig()

class Echo(vf.Taskset[EchoTask, EchoConfig]):
    {taskset_tools}

    def load(self):
        yield EchoTask(vf.TaskData(prompt="echo x"), self.config.task)

__all__ = ["Echo"]
"""
OF_EACH = "toolsets = classmethod(lambda cls, config: [EchoTools(config.tools)])"
OF_ALL = "toolsets = classmethod(lambda cls, config: [EchoTools(config.task.tools)])"


@pytest.fixture
def tool_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages echo_each, like verifiers' scaffold, and echo_shared, which shares one tool server among episodes."""
    for name, fields in {
        "echo_each": {"kind": "", "task_tools": OF_EACH, "taskset_tools": ""},
        "echo_shared": {"kind": "Shared", "task_tools": "", "taskset_tools": OF_ALL},
    }.items():
        (tmp_path / f"{name}.py").write_text(SCAFFOLD.format(**fields))
    monkeypatch.syspath_prepend(str(tmp_path))


def recipe_with(environment: dict, renderer: dict, **more: object) -> Recipe:
    model = {"name": "m", "renderer": renderer}
    block = {"kind": "rl", "name": "r", "model": model, "max_steps": 1}
    return parse_recipe({**block, "environments": {"train": [environment]}, **more})


@pytest.mark.usefixtures("tool_environments")
@pytest.mark.parametrize("name", ["calculator", "echo-each", "echo-shared"])
@pytest.mark.parametrize("renderer", ["chatml", "default"])
def test_an_environment_with_tools_and_a_renderer_without_are_refused_at_submission(
    name: str, renderer: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"environment {name}: the environment has tools, but renderer '{renderer}'"
    ):
        check_tools(recipe_with({"id": name}, {"name": renderer}))
    check_tools(recipe_with({"id": name}, {"name": "qwen3"}))
    check_tools(recipe_with({"id": name}, {"name": "default", "options": {"tool_parser": "qwen3"}}))
    check_tools(recipe_with({"id": "reverse-text"}, {"name": renderer}))
    for other in ("not-installed-here", "sys", "json"):
        check_tools(recipe_with({"id": other}, {"name": renderer}))


def test_our_renderers_without_tools_are_listed() -> None:
    assert {name for name, path in OWN_RENDERERS.items() if not locate(path).supports_tools} == WITHOUT_TOOLS


@pytest.mark.usefixtures("tool_environments")
@pytest.mark.parametrize(
    ("name", "env_args", "processes"),
    [
        ("echo-each", {}, ["tool server echo_tools"]),
        ("echo-each", {"taskset": {"task": {"tools": {"url": "http://tools/mcp"}}}}, []),
        ("echo-each", {"taskset": {"task": {"tools": {"colocated": True}}}}, ["tool server echo_tools"]),
        ("echo-each", {"taskset": {"task": {"tools": {"runtime": {"type": "modal"}}}}}, []),
        ("echo-shared", {}, []),
        ("reverse-text", {}, []),
        ("calculator", {}, []),
        ("nim", {}, []),
        ("reverse-text", {"agent": {"harness": {"id": "bash"}}}, ["program of harness bash of agent agent"]),
        (
            "reverse-text",
            {"agent": {"runtime": {"type": "apptainer"}}},
            ["apptainer container of agent agent"],
        ),
        ("reverse-text", {"agent": {"runtime": {"type": "modal"}, "harness": {"id": "bash"}}}, []),
    ],
)
def test_processes_per_episode_are_known_before_the_first_episode(
    name: str, env_args: dict, processes: list[str]
) -> None:
    assert processes_of(resolve_environment(Environment(id=name, env_args=env_args))) == processes


@pytest.mark.usefixtures("tool_environments")
def test_env_check_warns_of_a_tool_server_per_episode_and_explains_how_to_share_it() -> None:
    (warning,) = check_environment(Environment(id="echo-each")).warnings
    assert "environment echo-each starts 1 process for each episode (tool server echo_tools)" in warning
    assert "vf.SharedToolsetConfig" in warning and "docs/environments.md" in warning
    assert not check_environment(Environment(id="echo-shared")).warnings


def test_an_installed_package_takes_precedence_over_a_shipped_one(tmp_path: Path) -> None:
    (tmp_path / "reverse_text.py").touch()
    code = (
        "from primerl_hpc.envs import expose_shipped; expose_shipped(); expose_shipped()\n"
        "from importlib.util import find_spec\n"
        "assert find_spec('inproc_chat'); print(find_spec('reverse_text').origin)"
    )
    done = captured(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    )
    assert done.stdout.strip() == str(tmp_path / "reverse_text.py")


# -- reverse-text ----------------------------------------------------------------------------------


def test_train_and_test_share_no_word_for_any_seeds() -> None:
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


def test_too_many_words_are_an_error_and_not_an_endless_loop() -> None:
    with pytest.raises(DataError, match="fewer than 100 distinct train words with 1 to 1 letters"):
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


# -- the in-process harness with a faulty server
# --------------------------------------------------------------------------


@contextmanager
def chat_server(script: list[int | None]) -> Iterator[tuple[str, list[dict]]]:
    """Server that responds with the statuses in ``script`` (None: disconnect), then 200. Yields URL and requests."""
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


def test_the_harness_retries_after_an_error_status_and_after_a_broken_connection() -> None:
    with chat_server([503, None, 429]) as (url, seen):
        result = launch(url)
    assert result.exit_code == 0
    assert [request["retry"] for request in seen] == [None, "1", "2", "3"]
    assert seen[0]["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
    ]


def test_the_harness_gives_up_after_its_retries_with_the_servers_message() -> None:
    with chat_server([500, 500, 500]) as (url, seen):
        result = launch(url, max_retries=1)
    assert (result.exit_code, len(seen)) == (1, 2)
    assert "HTTP 500" in result.stderr


def test_a_rejected_turn_is_not_retried() -> None:
    with chat_server([400]) as (url, seen):
        result = launch(url)
    assert (result.exit_code, len(seen)) == (1, 1)


def test_a_cache_folder_on_the_node_that_others_can_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", "/proc/1")  # no folder can be created there
    monkeypatch.delenv("HF_HOME", raising=False)
    with home_for_caches():
        home = Path.home()
    assert home.parent == tmp_path and home.stat().st_mode & 0o777 == 0o700
    home.chmod(0o777)
    with pytest.raises(ConfigError, match="not a folder that only this user can write"), home_for_caches():
        pass
