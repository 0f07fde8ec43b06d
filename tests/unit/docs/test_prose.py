"""Language and references of documentation, docstrings, comments and messages (CONTRIBUTING.md, "How the code is
written").

Print the findings of one folder with ``python -m tests.unit.docs.test_prose FOLDER``.
"""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click
import pytest

from primerl_hpc.cli.main import cli
from tests.support.helpers import ROOT

PACKAGE = ROOT / "primerl_hpc"
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "decisions").glob("*.md")]
)
MAX_COLUMNS = 120
MIN_WORDS = 3
"""A string literal with fewer words is a name or a key, not prose."""


@dataclass(frozen=True)
class Rule:
    pattern: re.Pattern[str]
    replacement: str
    is_first_word: bool


@dataclass(frozen=True)
class Prose:
    file: str
    line: int  # of the first character
    text: str
    is_docstring: bool = False


@cache
def rules() -> tuple[Rule, ...]:
    lines = Path(__file__).with_name("deny_list.txt").read_text().splitlines()
    parts = [line.split(" -> ") for line in lines if line and not line.startswith("#")]
    return tuple(
        Rule(re.compile(f"^(?:{pattern[1:]})", re.I), replacement, is_first_word=True)
        if pattern.startswith("^")
        else Rule(re.compile(rf"\b(?:{pattern})\b", re.I), replacement, is_first_word=False)
        for pattern, replacement in parts
    )


def violations(prose: Prose) -> list[str]:
    # a code span keeps its length and its line ends
    text = re.sub(r"(`+)[^`]*\1", lambda span: re.sub(r"[^`\n]", "x", span[0]), prose.text)
    return [
        f"{prose.file}:{prose.line + text.count(chr(10), 0, match.start())}: {match[0]!r} -> {rule.replacement}"
        for rule in rules()
        if prose.is_docstring or not rule.is_first_word
        for match in rule.pattern.finditer(text)
    ]


def page_lines(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a Markdown page that are not code."""
    is_fenced = False
    previous = ""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
        # four spaces after a blank line or after code begin code, elsewhere they continue a list item
        is_indented = line.startswith("    ") and (not previous.strip() or previous.startswith("    "))
        if not is_fenced and not is_indented and line.strip():
            yield number, line
        previous = line


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of a module of the package, which two tests read."""
    return list(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(scope="module", autouse=True)
def forget_nodes() -> Iterator[None]:
    """They are half a million objects, which garbage collections in later tests would visit."""
    yield
    nodes_of.cache_clear()


def docstrings(nodes: list[ast.AST]) -> Iterator[ast.Constant]:
    """Yield docstrings of modules, classes, functions and fields: every statement that is a string."""
    for node in nodes:
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value


def messages(source: str, nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of string literals that are prose. Replacement fields of f-strings become {}.

    Raw strings are patterns, often of messages of other programs, and are left out.
    """
    lines = source.splitlines()
    skipped = {id(each) for each in docstrings(nodes)}
    for node in nodes:
        if not isinstance(node, ast.JoinedStr | ast.Constant) or id(node) in skipped:
            continue
        prefix = lines[node.lineno - 1].encode()[node.col_offset :][:2].partition(b'"')[0]
        is_raw = b"r" in prefix.lower()
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(each) for each in node.values}
            parts = [each.value if isinstance(each, ast.Constant) else "{}" for each in node.values]
            text = "".join(map(str, parts))
        else:
            text = node.value if isinstance(node.value, str) else ""
        if text and not is_raw:
            yield node.lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    if "#" not in source:
        return  # many modules: tokens take as long as all other checks
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@cache
def package_findings() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Findings of the deny list and of the width, by folder of the package."""
    words: dict[str, list[str]] = defaultdict(list)
    wide: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        folder = inside.parts[0] if len(inside.parts) > 1 else "."
        source = path.read_text()
        nodes, lines = nodes_of(path), source.splitlines()
        described, commented = list(docstrings(nodes)), list(comments(source))
        prose = [Prose(str(inside), node.lineno, str(node.value), is_docstring=True) for node in described]
        prose += [Prose(str(inside), line, text) for line, text in commented]
        prose += [
            Prose(str(inside), line, text)
            for line, text in messages(source, nodes)
            if len(re.findall(r"[^\W\d_]{2,}", text)) >= MIN_WORDS
        ]
        words[folder] += [found for each in prose for found in violations(each)]
        prose_lines = {
            number for node in described for number in range(node.lineno, (node.end_lineno or 0) + 1)
        } | {number for number, _ in commented}
        wide[folder] += [
            f"{inside}:{number}" for number in sorted(prose_lines) if len(lines[number - 1]) > MAX_COLUMNS
        ]
    return words, wide


def test_prose_of_tests_uses_no_word_of_the_deny_list() -> None:
    found: list[str] = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        source, name = path.read_text(), str(path.relative_to(ROOT))
        nodes = list(ast.walk(ast.parse(source)))
        prose = [Prose(name, node.lineno, str(node.value), is_docstring=True) for node in docstrings(nodes)]
        prose += [Prose(name, line, text) for line, text in comments(source)]
        prose += [
            Prose(name, node.lineno, node.name.replace("_", " "))
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        ]
        found += [each for text in prose for each in violations(text)]
    assert not found, "\n".join(found)


FOLDERS = sorted({path.parent.relative_to(PACKAGE).parts[0] for path in PACKAGE.glob("*/*.py")} | {"."})


def test_prose_of_the_package_uses_no_word_of_the_deny_list_and_fits_its_width() -> None:
    words, wide = ([place for places in found.values() for place in places] for found in package_findings())
    assert not words, "\n".join(words)
    assert not wide, "\n".join(wide)


def test_a_class_name_exists_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert not twice


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_documentation_uses_no_word_of_the_deny_list() -> None:
    found = [
        violation
        for page in PAGES
        for number, line in page_lines(page)
        for violation in violations(Prose(name_of(page), number, line))
    ]
    assert not found, "\n".join(found)


def test_no_line_of_documentation_is_wider_than_its_limit() -> None:
    """Rows of tables cannot be wrapped; all other prose can."""
    wide = [
        f"{name_of(page)}:{number}"
        for page in PAGES
        for number, line in page_lines(page)
        if len(line) > MAX_COLUMNS and not line.lstrip().startswith("|")
    ]
    assert not wide


REPOSITORY_FOLDERS = {
    *("primerl_hpc", "tests", "tools", "docs", "recipes", "cluster_profiles", "constraints", "templates")
}
PLACEHOLDERS = {"constraints/EXTRA.txt"}
"""Names that stand for several files."""


def test_a_path_in_backticks_exists() -> None:
    """`folder/module.py` is relative to the package or the repository; paths of examples are not checked."""
    text = "\n".join(line for page in PAGES for _, line in page_lines(page))
    missing = []
    for path in re.findall(r"`([\w.-]+(?:/[\w.-]+)+/?)`", text):
        first = path.split("/")[0]
        is_of_package = path.endswith(".py") and (PACKAGE / first).is_dir()
        if path in PLACEHOLDERS or not (is_of_package or first in REPOSITORY_FOLDERS):
            continue
        if not (ROOT / path).exists() and not (PACKAGE / path).exists():
            missing.append(path)
    assert not missing


def heading_anchors(page: Path) -> set[str]:
    """The anchors that GitHub derives from the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_a_link_leads_to_a_page_and_a_heading() -> None:
    broken = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)", page.read_text()):
            if target.startswith(("http://", "https://")):
                continue
            path = (page.parent / target).resolve() if target else page
            if not path.exists() or (anchor and anchor not in heading_anchors(path)):
                broken.append(f"{name_of(page)}: {target}#{anchor}")
    assert not broken


def shown_commands(page: Path) -> list[str]:
    """Return lines of code, and commands in backticks."""
    prose = {number for number, _ in page_lines(page)}
    lines = page.read_text().splitlines()
    shown = [line.strip() for number, line in enumerate(lines, 1) if number not in prose]
    return shown + re.findall(r"`(primerl-hpc [^`]+)`", "\n".join(lines))


def test_a_command_and_its_options_exist() -> None:
    """``primerl-hpc COMMAND --option`` in lines of code and in backticks."""
    context = click.Context(cli)
    shown = [line for page in PAGES for line in shown_commands(page)]
    unknown = []
    for line in shown:
        if not line.startswith("primerl-hpc "):
            continue
        words = re.split(r"  +|\s#", line)[0].split()[1:]
        command = cli.get_command(context, words[0])
        if isinstance(command, click.Group):
            command = command.get_command(context, words[1])
        known = (
            {name for each in command.params for name in each.opts + each.secondary_opts} if command else ()
        )
        options = re.findall(r"(?<![\w-])--?[a-z][a-z-]*", " ".join(words[1:]))
        if command is None or not set(options) <= set(known):
            unknown.append(line)
    assert not unknown


def test_the_tree_of_the_architecture_page_is_the_package() -> None:
    """Every folder of the first two levels is in the annotated tree, and nothing else is."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    tree = page.partition("```text\nprimerl_hpc/\n")[2].partition("```")[0]
    folders, parent = [], ""
    for indent, name in re.findall(r"^([│ ]{4})?[├└]── (\w+)/ ", tree, re.M):
        parent = parent if indent else name
        folders.append(f"{parent}/{name}" if indent else name)
    modules = [path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("__init__.py")]
    existing = {str(each) for each in modules if 1 <= len(each.parts) <= 2}
    assert Counter(folders) == Counter(existing)


def test_no_tracked_file_has_merge_conflict_markers() -> None:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a checkout")
    marker = re.compile(rb"^(<{7} |>{7} |\|{7} |={7}$)", re.M)
    files = [ROOT / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    assert files
    assert [str(path) for path in files if path.is_file() and marker.search(path.read_bytes())] == []


def test_the_deny_list_finds_what_it_must() -> None:
    """The check itself can fail: one sentence for each group of the list, and one without a finding."""
    for text in (
        "it goes on",
        "the whole batch",
        "a process's life",
        "its colour",
        "nobody answers",
        "made-up data",
    ):
        assert violations(Prose("here", 1, text)), text
    assert violations(Prose("here", 1, "Of this process.", is_docstring=True))
    assert not violations(Prose("here", 1, "Return the complete batch of `whole` incarnations."))


if __name__ == "__main__":
    words, wide = package_findings()
    for name in sys.argv[1:] or FOLDERS:
        print(*words[name], *(f"{place}: wide line" for place in wide[name]), sep="\n")
