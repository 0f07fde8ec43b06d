"""docs/extending.md: the blocks of each section are written or applied to a copy of the package, and its checks run.

The first line of a block is a comment with its kind:

    # my_package/losses.py                                  a new file, in the working folder or in the copy
    # primerl_hpc/…/x.py: insert before "text"              an edit of the copy; the text occurs once
    # primerl_hpc/…/x.py: replace "text"
    # check                                                 Python or shell commands that must succeed
    # check: recipe                                         keys that a recipe accepts
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.support.fork_server import ForkServer
from tests.support.helpers import PATIENCE_S, ROOT

pytest.importorskip("torch")
pytest.importorskip("verifiers")

PAGE = (ROOT / "docs" / "extending.md").read_text()
EDIT = re.compile(r'(?P<path>\S+): (?P<what>insert before|replace) "(?P<text>.+)"')


@dataclass(frozen=True)
class Block:
    language: str
    head: str  # the first line without its "# "
    body: str


def sections() -> dict[str, list[Block]]:
    """Blocks of each second-level heading."""
    found = {}
    for part in re.split(r"^## ", PAGE, flags=re.M)[1:]:
        fences = re.findall(r"^```(\w+)\n# ([^\n]+)\n(.*?)^```$", part, re.M | re.S)
        found[part.splitlines()[0]] = [Block(*fence) for fence in fences]
    return found


SECTIONS = sections()


def edit(file: Path, what: str, text: str, body: str) -> None:
    before = file.read_text()
    text = text.replace('\\"', '"')
    if what == "insert before" and body.startswith(("class ", "def ")):
        body += "\n\n"
    assert before.count(text) == 1, f"{file.name} has {text!r} {before.count(text)} times"
    file.write_text(before.replace(text, body + text if what == "insert before" else body.removesuffix("\n")))


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Libraries read this variable when they are imported."""
    server = ForkServer("tests.support.script_server", HF_HUB_OFFLINE="1")
    yield server
    server.stop()


def check(block: Block, folder: Path, server: ForkServer) -> None:
    environ = {**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
    if block.language == "bash":
        lines = [shlex.split(line) for line in block.body.splitlines()]
        assert lines and all(words[0] == "primerl-hpc" for words in lines)
        commands = [["-m", "primerl_hpc", *words[1:]] for words in lines]
    else:
        origin = f"import primerl_hpc\nassert primerl_hpc.__file__.startswith({str(folder)!r})\n"
        commands = [["-c", origin + block.body]]
    output = folder / "output"
    request = {"cwd": str(folder), "environment": environ, "output": str(output)}
    for command in commands:
        reply = server.ask({**request, "words": command}, PATIENCE_S)
        assert reply == "0\n", output.read_text()


def check_recipe(block: Block, folder: Path, server: ForkServer) -> None:
    """The keys are those of a recipe, and the function that they name exists."""
    keys = yaml.safe_load(block.body)
    code = (
        "from primerl_hpc.common.importing import import_object\n"
        "from primerl_hpc.recipe.load import load_recipe\n"
        f"recipe = load_recipe('recipe.yaml').recipe\n"
        f"for key in {list(keys)!r}: import_object(getattr(recipe, key).import_path, location=key)\n"
    )
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"base": "reverse_text/tiny.yaml", **keys}))
    check(Block("python", "check", code), folder, server)


def test_the_page_has_a_section_for_every_extension_point() -> None:
    assert list(SECTIONS) == [
        *("A loss", "An algorithm", "A profile key that reaches srun", "A model family", "A metric"),
        *("An environment", "A transport"),
    ]
    for title, blocks in SECTIONS.items():
        assert any(block.head == "check" for block in blocks), title
    assert sum(map(len, SECTIONS.values())) == len(re.findall(r"^```\w", PAGE, re.M))


@pytest.mark.parametrize("title", SECTIONS)
def test_the_example_of_a_section_works(title: str, tmp_path: Path, server: ForkServer) -> None:
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("primerl_hpc", "recipes", "cluster_profiles", "templates"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    checks = []
    for block in SECTIONS[title]:
        if block.head.startswith("check"):
            checks.append(block)
        elif match := EDIT.fullmatch(block.head):
            edit(tmp_path / match["path"], match["what"], match["text"], block.body)
        else:
            path = tmp_path / block.head
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body)
    for block in checks:
        (check_recipe if block.head == "check: recipe" else check)(block, tmp_path, server)
