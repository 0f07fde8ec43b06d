"""docs/environments.md: the page's own files, commands and recipe are extracted and run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.envs.tasks import resolve_environment
from primerl_hpc.recipe.renderer import load_tokenizer, make_renderer
from primerl_hpc.recipe.schema.model import Model
from primerl_hpc.recipe.schema.rollout import TrainEnvironment
from tests.support.forked_commands import run_command
from tests.support.helpers import ROOT, make_tiny_model
from tests.unit.envs.test_shipped_envs import scripted

PAGE = ROOT / "docs" / "environments.md"
OFFLINE = ["--", "--no-index", "--no-build-isolation", "-q"]
"""Additional arguments of `env install` in this test, which has no package index."""


@dataclass(frozen=True)
class Block:
    language: str
    text: str

    @property
    def path(self) -> str | None:
        """Write the file that the block contains; its first line names the file."""
        found = re.match(r"# ([\w./-]+)\n", self.text)
        return found[1] if found else None


def blocks() -> list[Block]:
    found = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return [Block(language, text) for language, text in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reader works: what `vf-init` makes, and over it the files of the page."""
    made = tmp_path_factory.mktemp("environments")
    (scaffold,) = [block.text for block in blocks() if block.text.startswith("vf-init")]
    words = shlex.split(scaffold)
    run_here([str(Path(sys.executable).with_name("vf-init")), *words[1:]], made)
    skeleton = sorted(path.relative_to(made) for path in made.rglob("*.py"))
    for block in blocks():
        if block.path is not None:
            (made / block.path).parent.mkdir(parents=True, exist_ok=True)
            (made / block.path).write_text(block.text)
    mine = {path.relative_to(made) for path in made.rglob("*.py") if "my_stock" in path.parts}
    assert {*skeleton} == mine, "the page's files are those of the scaffold"
    return made


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """One command of the page, as typed in ``folder``."""
    return run_command(*words[1:], cwd=folder, environ={**os.environ, "PYTHONPATH": str(ROOT)})


def run_here(words: list[str], folder: Path) -> None:
    """One script, as typed in ``folder``, in this process: it has imported what a new interpreter takes seconds for."""
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        patch.setattr(sys, "argv", words)
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            assert not end.code, end.code


def answer(request: dict) -> dict:
    """Call the tool that the last user message asks for, then reply with the number."""
    messages = request["messages"]
    if messages[-1]["role"] == "tool":
        return {"content": f"There are {messages[-1]['content']}."}
    if not request.get("tools"):
        a, b = map(int, re.findall(r"\d+", messages[-1]["content"]))
        return {"content": f"It is {a + b}."}
    item = re.search(r"how many (\w+)", messages[-1]["content"], re.I)[1]
    function = {"name": "count", "arguments": json.dumps({"item": item})}
    return {"tool_calls": [{"id": f"call-{len(messages)}", "type": "function", "function": function}]}


def commands() -> list[list[str]]:
    return [
        shlex.split(line)
        for block in blocks()
        if block.language == "bash"
        for line in block.text.splitlines()
        if line.startswith("primerl-hpc")
    ]


def test_the_pages_commands_run_in_their_order(folder: Path) -> None:
    assert len(commands()) == 4
    with scripted(answer) as url:
        for typed in commands():
            words = [url if word.startswith("http://") else word for word in typed]
            done = run(words + OFFLINE * ("install" in words), folder)
            assert done.returncode == 0, (words, done.stdout, done.stderr)
            if "--url" in words:
                assert "correct 1 after 4 turns" in done.stdout, done.stdout
    assert (folder / "envs" / "my_sums").is_dir() and not (folder / "envs" / "verifiers").exists()


def test_an_environment_of_one_turn_runs_too(folder: Path) -> None:
    with scripted(answer) as url:
        done = run(
            shlex.split(f"primerl-hpc env check my-sums --target my_sums --url {url} --model m"), folder
        )
    assert "correct 1, " in done.stdout or "correct 1 after 1 turns" in done.stdout, done.stdout + done.stderr


def test_verifiers_accepts_the_pages_recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("my_sums", "my_stock"):
        monkeypatch.syspath_prepend(str(folder / package))
    (recipe,) = [yaml.safe_load(block.text) for block in blocks() if block.language == "yaml"]
    sums, stock, sandboxed = (
        resolve_environment(TrainEnvironment.model_validate(each)) for each in recipe["environments"]["train"]
    )
    assert sums.taskset.digits == 2 and sums.agent.harness.id == "inproc-chat"
    assert stock.agent.max_turns == 9 and stock.agent.runtime.type == "subprocess"
    assert (sandboxed.agent.harness.id, sandboxed.agent.runtime.type) == ("bash", "apptainer")


def test_the_pages_script_gives_a_tokenizer_the_tokens_of_tools(folder: Path, tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "tiny", rows=1, hidden=32, layers=1) / "model"
    model = Model.model_validate({"name": str(source), "renderer": {"name": "qwen3"}})
    with pytest.raises(ConfigError, match="does not fit the tokenizer"):
        make_renderer(model, load_tokenizer(model))
    target = tmp_path / "with-tools"
    run_here(["add_tool_tokens.py", str(source), str(target)], folder)
    model = model.model_copy(update={"name": str(target)})
    call = {"id": "1", "type": "function", "function": {"name": "count", "arguments": '{"item": "figs"}'}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tokenizer = load_tokenizer(model)
    ids = make_renderer(model, tokenizer).render_ids(messages)
    assert tokenizer.convert_tokens_to_ids("<tool_call>") in ids
