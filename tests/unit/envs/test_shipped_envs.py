"""The shipped environments, run through verifiers with a scripted model behind a chat-completions server."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import pytest
from click.testing import CliRunner

from primerl_hpc.cli.main import cli
from primerl_hpc.common.errors import ConfigError, DataError
from primerl_hpc.envs.check import check_environment
from primerl_hpc.envs.shipped.local_search import ends_with_answer
from primerl_hpc.envs.shipped.math_problems import KINDS, MathConfig, generate
from primerl_hpc.envs.tasks import load_tasks
from primerl_hpc.envs.tool_servers.encyclopedia import write_articles
from primerl_hpc.envs.tool_servers.search import Index
from primerl_hpc.recipe.schema.rollout import Environment
from tests.support.api import Request, chat_completion, serve
from tests.support.helpers import ROOT, captured

Model = Callable[[dict], dict]
TINY = runpy.run_path(str(ROOT / "tools" / "tiny-model"))


@contextmanager
def scripted(model: Model) -> Iterator[str]:
    """Server that responds with ``model(request)``: a message, or a status as ``{"status": 400}``. Yields its URL."""

    def answer(request: Request) -> tuple[int, dict]:
        if not request.body:
            return 200, {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 512}]}
        message = model(request.body)
        return message.get("status", 200), chat_completion(message)

    with serve(answer) as url:
        yield f"{url}/v1"


def play(model: Model, environment_id: str, *, env_args: dict | None = None, **args) -> dict[str, dict]:
    """Run one rollout of the first task. Returns its traces by agent."""
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


# -- alphabet-sort ---------------------------------------------------------------------------------


def sort_all(request: dict) -> dict:
    return {"content": " ".join(sorted(names_in(request["messages"])))}


def test_alphabet_sort_gives_names_turn_by_turn_and_rewards_sorted_replies():
    trace = play(sort_all, "alphabet-sort", turns=3)["agent"]
    assert (trace["turns"], trace["rewards"]) == (3, {"similarity": 1.0})
    assert [message["role"] for message in trace["messages"]] == ["user", "assistant"] * 3


def test_alphabet_sort_counts_turns_that_were_not_reached_as_wrong():
    trace = play(sort_all, "alphabet-sort", turns=4, env_args={"agent": {"max_turns": 1}})["agent"]
    assert trace["rewards"] == {"similarity": 0.25}


@pytest.mark.parametrize(
    "environment_id", ["alphabet-sort", "calculator", "local-search", "math-problems", "nim"]
)
def test_train_and_test_share_no_task_and_are_the_same_in_every_run(environment_id):
    split = {}
    for name in ("train", "test"):
        environment = Environment(id=environment_id, args={"split": name})
        tasks = load_tasks(environment)
        assert tasks == load_tasks(environment)
        split[name] = {task.key for task in tasks}
    assert split["train"] and split["test"] and not split["train"] & split["test"]


# -- calculator ------------------------------------------------------------------------------------


def use_tools(request: dict) -> dict:
    """Model that multiplies with the tool, adds with the tool, and replies with the number."""
    assert {tool["function"]["name"] for tool in request["tools"]} == {"add", "multiply"}
    a, b, c = map(int, re.findall(r"\d+", request["messages"][0]["content"])[:3])
    results = [message["content"] for message in request["messages"] if message["role"] == "tool"]
    steps = [("multiply", {"a": a, "b": b}), ("add", {"a": results and int(results[0]), "b": c})]
    if len(results) == 2:
        return {"content": f"The result is {results[1]}."}
    name, arguments = steps[len(results)]
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"tool_calls": [{"id": f"call-{len(results)}", "type": "function", "function": function}]}


def test_calculator_calls_reach_the_tool_server_and_the_number_is_scored():
    trace = play(use_tools, "calculator", num_tasks=2)["agent"]
    assert (trace["turns"], trace["rewards"]) == (3, {"correct": 1.0})


# -- local-search ----------------------------------------------------------------------------------


def look_up(request: dict) -> dict:
    """Model that searches for the words of the question, then for the twin town, and replies with the answer."""
    assert json.dumps(request["tools"]) == json.dumps([TINY["SEARCH_TOOL"]])  # models see the order of keys
    question = request["messages"][0]["content"]
    results = [message["content"] for message in request["messages"] if message["role"] == "tool"]
    needed = 2 if "the twin town of" in question else 1
    if len(results) < needed:
        words = re.findall(r"(?:mayor is|river is called) ([A-Z]\w+(?: [A-Z]\w+)?)", question)[0]
        query = re.findall(r"Its twin town is (\w+)", results[0])[0] if results else words
        function = {"name": "search", "arguments": json.dumps({"query": query})}
        return {"tool_calls": [{"id": f"call-{len(results)}", "type": "function", "function": function}]}
    first = results[-1].split("\n\n")[0]
    patterns = {
        "In which year": r"founded in (\d+)",
        "How many": r"has (\d+) inhabitants",
        "Who is": r"mayor is ([\w ]+)\.",
        "For which": r"known for ([\w ]+), and",
        "What is": r"best-known dish is ([\w ]+)\.",
    }
    (pattern,) = [pattern for start, pattern in patterns.items() if question.startswith(start)]
    return {"content": f"I found it.\n{re.findall(pattern, first)[0]}"}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_questions_about_the_encyclopedia_are_answered_by_searching(seed):
    trace = play(look_up, "local-search", num_tasks=2, seed=seed)["agent"]
    assert trace["rewards"] == {"correct": 1.0}
    assert trace["turns"] in (2, 3)


@pytest.mark.parametrize(
    ("reply", "is_right"),
    [
        ("I found it.\n1120", True),
        ("**1120.**", True),
        ("1,120", True),
        ("11120", False),
        ("no idea, 1120 or 1200", False),  # a list of candidates must not be rewarded
        ("1120\nI am not sure.", False),
        ("", False),
    ],
)
def test_the_last_line_must_be_the_answer_and_nothing_else(reply, is_right):
    assert ends_with_answer(reply, "1120") == is_right


def test_a_wrong_answer_without_a_search_has_no_reward():
    trace = play(lambda request: {"content": "no idea"}, "local-search", num_tasks=1)["agent"]
    assert (trace["turns"], trace["rewards"]) == (1, {"correct": 0.0})


def test_a_search_takes_words_only_and_ranks_the_article_first():
    towns = write_articles(num_articles=50, seed=3)
    index = Index(50, 3)
    assert index.search(towns[7].mayor)[0] == towns[7].text
    for query in ("", '"', "AND OR NEAR( *", "'); DROP TABLE articles; --"):
        assert isinstance(index.search(query), list)
    assert index.search(towns[7].river)[0] == towns[7].text
    assert len({name for town in towns for name in (town.name, town.river, town.mayor)}) == 150
    assert write_articles(num_articles=50, seed=3) == towns


# -- math-problems ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_answers_of_generated_problems_are_right(kind):
    """Each kind is solved again by brute force or substitution from the text of the problem."""
    for problem, answer in generate(MathConfig(kinds=[kind], num_tasks=20, seed=5)):
        numbers = [int(number) for number in re.findall(r"(?:(?<=[( ])-)?\d+", problem.replace("- ", "-"))]
        assert solves(kind, problem, numbers, answer), (problem, answer)


def solves(kind: str, problem: str, numbers: list[int], answer: str) -> bool:
    if kind == "linear":
        a, b, c, d = numbers
        return a * Fraction(answer) + b == c * Fraction(answer) + d
    if kind == "quadratic":  # numbers: 2 of x^2, coefficients, 0
        roots = [x for x in range(-700, 701) if x * x + numbers[1] * x + numbers[2] == 0]
        return max(roots) == int(answer)
    if kind == "fractions":
        one, two, three = (Fraction(text) for text in re.findall(r"[\d/]+", problem.split("Compute")[1])[:3])
        return one + two * three == Fraction(answer)
    if kind == "power":
        base, exponent, modulus = numbers
        return base**exponent % modulus == int(answer)
    if kind == "derivative":
        a, b, c, x = (
            int(text) for text in re.findall(r"(\d+)x\^3 - (\d+)x\^2 \+ (\d+)x.*f'\((\d+)\)", problem)[0]
        )
        slope = Fraction(1, 10**6)
        value = [a * y**3 - b * y**2 + c * y for y in (x - slope, x + slope)]
        return round((value[1] - value[0]) / (2 * slope)) == int(answer)
    if kind == "system":
        a, s, b, t = (
            int(text) for text in re.findall(r"(\d+)x \+ y = (-?\d+) and x - (\d+)y = (-?\d+)", problem)[0]
        )
        found = [(x, y) for x in range(-15, 16) for y in range(-15, 16) if a * x + y == s and x - b * y == t]
        return [x * y for x, y in found] == [int(answer)]
    if kind == "distance":
        x1, y1, x2, y2 = (int(text) for text in re.findall(r"-?\d+", problem))
        number = re.findall(r"\d+", answer)[0]
        return math.hypot(x1 - x2, y1 - y2) == pytest.approx(
            math.sqrt(int(number)) if "sqrt" in answer else int(number)
        )
    red, blue, drawn = numbers
    draws = list(itertools.combinations(["red"] * red + ["blue"] * blue, drawn))
    return Fraction(sum(set(draw) == {"red"} for draw in draws), len(draws)) == Fraction(answer)


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("The root is \\boxed{0.5}.", 1.0),
        ("\\boxed{\\frac{2}{4}}", 1.0),
        ("\\boxed{1/3}", 0.0),
        ("0.5", 0.0),  # no box
        ("\\boxed{", 0.0),
        ("\\boxed{" + "(" * 300 + "}", 0.0),
    ],
)
def test_an_answer_counts_as_an_expression_in_its_box(tmp_path, reply, reward):
    file = tmp_path / "problems.jsonl"
    file.write_text('{"question": "Half of one?", "solution": "\\\\frac{1}{2}"}\n')
    args = {"file": str(file), "problem_field": "question", "answer_field": "solution"}
    trace = play(lambda request: {"content": reply}, "math-problems", **args)["agent"]
    assert trace["rewards"] == {"correct": reward}


def test_a_file_that_is_no_list_of_problems_is_refused_with_its_row(tmp_path):
    file = tmp_path / "problems.jsonl"
    file.write_text('{"problem": "1 + 1?", "answer": 2}\n{"problem": "?"}\n')
    with pytest.raises((ConfigError, DataError), match=r"problems.jsonl: row 2 has no field answer"):
        load_tasks(Environment(id="math-problems", args={"file": str(file)}), limit=2)
    file.write_text("5\n")
    with pytest.raises((ConfigError, DataError), match=r"problems.jsonl: row 1 is not a JSON object"):
        load_tasks(Environment(id="math-problems", args={"file": str(file)}), limit=2)
    file.write_text("[1\n")
    with pytest.raises((ConfigError, DataError), match=r"problems.jsonl:1: not JSON"):
        load_tasks(Environment(id="math-problems", args={"file": str(file)}), limit=2)


# -- multiple-choice -------------------------------------------------------------------------------


QUESTION = {"question": "2 + 2?", "answer": "four", "wrong": ["three", "five", "six"]}


def choose(text: str, form: str) -> Model:
    """Model that gives the letter of the choice ``text``, written as ``form``."""

    def model(request: dict) -> dict:
        prompt = request["messages"][-1]["content"]
        letter = re.search(rf"^([A-Z])\) {text}$", prompt, re.M)
        assert letter is not None, prompt
        return {"content": form.format(letter[1])}

    return model


@pytest.mark.parametrize(
    ("text", "form", "reward"),
    [
        ("four", "\\boxed{{{}}}", 1.0),
        ("four", "A is wrong. So the answer is: **{}**", 1.0),
        ("four", "Answer: ({})", 1.0),
        ("four", "Not \\boxed{{Z}}, but \\boxed{{\\text{{{}}}}}", 1.0),
        ("five", "\\boxed{{{}}}", 0.0),
        ("four", "It is {}", 0.0),
    ],
)
def test_the_last_letter_of_a_reply_is_its_choice(tmp_path, text, form, reward):
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps(QUESTION) + "\n")
    trace = play(choose(text, form), "multiple-choice", file=str(file))["agent"]
    assert trace["rewards"] == {"correct": reward}


def test_choices_are_in_the_same_order_in_every_run_and_the_right_one_is_at_every_place(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({**QUESTION, "question": f"{n}?"}) + "\n" for n in range(40)))
    environment = Environment(id="multiple-choice", args={"file": str(file)})
    tasks = load_tasks(environment)
    assert tasks == load_tasks(environment)
    assert {task.data["answer"] for task in tasks} == {"A", "B", "C", "D"}


@pytest.mark.parametrize("environment", ["multiple-choice", "math-problems"])
def test_rows_may_contain_line_separators_and_files_a_byte_order_mark_and_carriage_returns(
    tmp_path, environment
):
    file, text = tmp_path / "rows.jsonl", "2 + 2\u2028=\x85?"
    rows = [{**QUESTION, "question": text}, {"problem": text, "answer": 4}]
    row = json.dumps(rows[environment == "math-problems"], ensure_ascii=False)
    file.write_bytes(b"\xef\xbb\xbf" + f"{row}\r\n\r\n{row.replace('2 + 2', '2 + 02')}\r\n".encode())
    tasks = load_tasks(Environment(id=environment, args={"file": str(file)}), limit=3)
    assert len(tasks) == 2
    assert all("2\u2028=\x85?" in str(task.data["prompt"]) for task in tasks)


def test_questions_without_a_field_or_with_an_ambiguous_answer_are_refused_with_their_row(tmp_path):
    file = tmp_path / "questions.jsonl"
    environment = Environment(id="multiple-choice", args={"file": str(file)})
    file.write_text(json.dumps(QUESTION) + "\n" + json.dumps({"question": "?", "answer": "x"}) + "\n")
    with pytest.raises(DataError, match=r"questions.jsonl: row 2 has no field wrong"):
        load_tasks(environment)
    file.write_text(json.dumps({**QUESTION, "wrong": ["four", "five"]}) + "\n")
    with pytest.raises(DataError, match="needs 1 to 25 wrong answers that differ from the right one"):
        load_tasks(environment)


def test_fields_that_arrow_filled_with_null_are_no_choices_and_no_questions(tmp_path):
    file = tmp_path / "questions.jsonl"
    environment = Environment(
        id="multiple-choice", args={"file": str(file), "wrong_fields": ["wrong", "fourth"]}
    )
    file.write_text(json.dumps({**QUESTION, "fourth": None}) + "\n")
    [task] = load_tasks(environment)
    assert "C)" in task.data["prompt"] and "None" not in task.data["prompt"]
    file.write_text(json.dumps({**QUESTION, "fourth": "seven", "answer": None}) + "\n")
    with pytest.raises(DataError, match="row 1 has null in field answer"):
        load_tasks(environment)
    file.write_text(json.dumps({"problem": "1 + 1?", "answer": None}) + "\n")
    with pytest.raises(DataError, match="row 1 has no field answer"):
        load_tasks(Environment(id="math-problems", args={"file": str(file)}))


# -- nim -------------------------------------------------------------------------------------------


def take(moves: Callable[[int], int]) -> Model:
    def model(request: dict) -> dict:
        stones = int(re.findall(r"(\d+) stones", request["messages"][-1]["content"])[-1])
        return {"content": f"I take {moves(stones)}"}

    return model


def test_nim_is_played_by_both_agents_to_the_last_stone():
    traces = play(take(lambda stones: 1), "nim", min_stones=5, max_stones=5)
    assert {agent: trace["rewards"]["win"] for agent, trace in traces.items()} == {
        "first": 1.0,
        "second": -1.0,
    }
    assert (traces["first"]["turns"], traces["second"]["turns"]) == (3, 2)


def test_an_illegal_move_in_nim_loses_immediately():
    traces = play(take(lambda stones: 1 if stones > 4 else 9), "nim", min_stones=5, max_stones=5)
    assert {agent: trace["rewards"]["win"] for agent, trace in traces.items()} == {
        "first": 1.0,
        "second": -1.0,
    }


def test_an_illegal_first_move_in_nim_loses_before_the_opponent_moves():
    traces = play(take(lambda stones: 9), "nim", min_stones=5, max_stones=5)
    assert {agent: trace["rewards"]["win"] for agent, trace in traces.items()} == {
        "first": -1.0,
        "second": 1.0,
    }
    assert traces["second"]["turns"] == 0


# -- env check -------------------------------------------------------------------------------------


def run(*words: str):
    return CliRunner().invoke(cli, ["env", *words], catch_exceptions=True)


def test_env_check_loads_an_environment_and_shows_its_tasks():
    done = run("check", "alphabet-sort", "--arg", "num_tasks=7", "--json")
    report = json.loads(done.output)
    assert (report["num_tasks"], report["agents"], report["rollout"]) == (7, ["agent"], None)


def test_env_check_runs_one_task_on_the_given_server():
    with scripted(sort_all) as url:
        done = run("check", "alphabet-sort", "--url", url, "--model", "m", "--arg", "turns=2")
    assert done.exit_code == 0, done.output
    assert "similarity 1 after 2 turns" in done.output


def test_env_check_reports_that_the_recipe_needs_a_judge_and_uses_the_model_as_judge(tmp_path):
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
    "no reward": ("pass", "agent has no finite reward"),
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
    assert caught.value.location.startswith(f"environment {environment.label}, task ")


def test_an_environment_without_tasks_is_named(tmp_path, monkeypatch):
    environment = broken(tmp_path, monkeypatch, "empty", "pass", load="return iter(())")
    with pytest.raises(DataError, match="the environment has no tasks") as caught:
        load_tasks(environment)
    assert caught.value.location == "environment broken-empty"


def test_a_hanging_environment_is_a_timeout(tmp_path, monkeypatch):
    hang = "@vf.reward(weight=1.0)\n    async def good(self, trace: vf.Trace) -> float:\n        import asyncio\n        await asyncio.Event().wait()"  # noqa: E501
    environment = broken(tmp_path, monkeypatch, "hanging", hang)
    with (
        scripted(lambda request: {"content": "hello"}) as url,
        pytest.raises(DataError, match="the rollout did not finish within"),
    ):
        check_environment(environment, url=url, model="m", key_variable="NO_KEY", timeout_s=2.0)


def test_an_error_status_of_the_server_is_reported():
    with scripted(lambda request: {"status": 400}) as url, pytest.raises(DataError, match="ProviderError"):
        check_environment(Environment(id="reverse-text"), url=url, model="m", key_variable="NO_KEY")


def test_env_install_puts_a_package_into_the_target(tmp_path):
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


def make_package(
    folder: Path, name: str, *, needs: tuple[str, ...] = (), code: str = "", version="1"
) -> Path:
    """Write the source of a package with one module."""
    module = name.replace("-", "_")
    (folder / name / module).mkdir(parents=True)
    (folder / name / module / "__init__.py").write_text(code)
    values = f"name={name!r}, version={version!r}, packages=[{module!r}], install_requires={list(needs)!r}"
    (folder / name / "setup.py").write_text(f"from setuptools import setup; setup({values})")
    return folder / name


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return pip's arguments for an index folder with a second NumPy and a helper package that is not installed."""
    folder = tmp_path_factory.mktemp("index")
    wheels = folder / "wheels"
    for each in (make_package(folder, "numpy", version="99"), make_package(folder, "tiny-helper")):
        words = (
            "wheel",
            "--no-index",
            "--no-build-isolation",
            "--no-deps",
            "-q",
            "-w",
            str(wheels),
            str(each),
        )
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    return ("--", "--no-index", "--no-build-isolation", "-q", "--find-links", str(wheels))


def test_env_install_does_not_copy_installed_packages_into_the_target(tmp_path, index):
    code = BROKEN.format(reward="pass", load=ONE_TASK)
    package = make_package(
        tmp_path, "told-apart", needs=("numpy", "transformers>=5", "tiny-helper"), code=code
    )
    target = tmp_path / "target"
    done = run("install", str(package), "--target", str(target), *index)
    assert done.exit_code == 0, done.output + str(done.exception)
    assert {path.name for path in target.iterdir() if "info" not in path.name} == {
        "told_apart",
        "tiny_helper",
    }
    assert "with tiny-helper 1" in done.output
    assert f"env check told-apart --target {target}" in done.output
    (package / "told_apart" / "__init__.py").write_text(code + "VERSION = 2\n")
    assert run("install", str(package), "--target", str(target), *index).exit_code == 0
    assert "VERSION = 2" in (target / "told_apart" / "__init__.py").read_text()


def test_env_install_refuses_a_package_that_requires_another_installed_version(tmp_path, index):
    package = make_package(tmp_path, "told-apart", needs=("numpy>=99",))
    for into, more in (((), ("--dry-run",)), (("--target", str(tmp_path / "target")), ())):
        done = run("install", str(package), *into, *index, *more)
        assert isinstance(done.exception, ConfigError) and "another version" in str(done.exception)
    assert not (tmp_path / "target").exists()


def test_setuptools_can_be_imported_after_an_installation(tmp_path):
    code = (
        "from primerl_hpc.common.errors import ConfigError\n"
        "from primerl_hpc.envs.install import install_package\n"
        "try:\n    install_package('./missing')\n"
        "except ConfigError:\n    import setuptools\n"
        "    print(setuptools.__name__)"
    )
    done = captured([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert done.stdout == "setuptools\n"


def test_env_check_imports_from_the_target_and_names_shadowed_packages(tmp_path, index):
    target = tmp_path / "target"
    package = make_package(tmp_path, "only-in-target", code=BROKEN.format(reward="pass", load=ONE_TASK))
    assert run("install", str(package), "--target", str(target), *index).exit_code == 0
    assert "there is no module" in str(run("check", "only-in-target").exception)
    report = json.loads(run("check", "only-in-target", "--target", str(target), "--json").output)
    assert report["location"] == str(target / "only_in_target" / "__init__.py") and not report["warnings"]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            *index[1:],
            "--no-deps",
            "--target",
            str(target),
            "numpy==99",
        ],
        check=True,
    )
    shutil.rmtree(target / "numpy")  # it must not be imported into this process
    (warning,) = json.loads(run("check", "only-in-target", "--target", str(target), "--json").output)[
        "warnings"
    ]
    assert "contains numpy 99, which takes precedence over numpy==" in warning
    assert "does not exist" in str(
        run("check", "reverse-text", "--target", str(tmp_path / "nowhere")).exception
    )
    assert str(target) not in sys.path and str(target) not in os.environ.get("PYTHONPATH", "")


def test_env_install_reports_a_failure_of_pip():
    done = run("install", "/no/such/folder", "--", "-q")
    assert "pip failed to install /no/such/folder" in str(done.exception)
