"""The metric catalog contains all metrics of the producers and equals the tables in docs/watching.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from primerl_hpc.observe.metric_catalog import FILES, METRICS, find_metric, is_known, markdown_table
from primerl_hpc.observe.report.report import CHARTS
from primerl_hpc.observe.status.one_run import STATUS_METRICS
from primerl_hpc.orchestrator.evaluation import eval_metrics
from primerl_hpc.recipe.schema.training import Loss
from tests.support.helpers import ROOT
from tests.unit.orchestrator.test_metrics import group, metrics, rollout  # noqa: F401 - a fixture

PRODUCERS = ("orchestrator", "trainer")
NAME = re.compile(r"[a-z_{}]+(/[a-z_@^{}]+)+")
NO_METRICS = {"application/json", "v{}/{}"}


def written_names(path: Path) -> Iterator[str]:
    """Keys of metrics in the source of a producer; ``{}`` stands for an interpolated value."""
    for node in ast.walk(ast.parse(path.read_text())):
        keys: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            keys = list(node.keys)
        elif isinstance(node, ast.Assign):
            keys = [target.slice for target in node.targets if isinstance(target, ast.Subscript)]
        elif isinstance(node, ast.DictComp):
            keys = [node.key]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            suffix = {"distribution": "/mean", "share": "/mean"}.get(node.func.id)
            if suffix is not None and (name := text_of(node.args[0])) is not None:
                yield name + suffix
        elif isinstance(node, ast.Tuple):
            for element in node.elts:
                keys += [key for key in getattr(element, "elts", [])]
        yield from (name for key in keys if (name := text_of(key)) is not None)


def text_of(node: ast.expr | None) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        return "".join(map(str, parts))
    return None


def examples() -> list[str]:
    """A name for each entry of the catalog, with and without its optional parts."""
    names = []
    for metric in METRICS:
        name = metric.name.replace("<statistic>", "mean")
        for short in (re.sub(r"\[[^\[\]]*(\[[^\]]*\])?[^\[\]]*\]", "", name), re.sub(r"[\[\]]", "", name)):
            names.append(re.sub(r"<\w+>", "x", short))
    return names


def test_every_metric_name_in_the_source_of_the_producers_is_in_the_catalog() -> None:
    found = {
        name
        for folder in PRODUCERS
        for path in (ROOT / "primerl_hpc" / folder).rglob("*.py")
        for name in written_names(path)
        if NAME.fullmatch(name) and re.search("[a-z]", name) and name not in NO_METRICS
    }
    known = examples()
    assert len(found) > 80
    missing = []
    for name in found:
        regex = re.compile(re.escape(name).replace(r"\{\}", ".*"))
        if not any(regex.fullmatch(example) for example in known):
            missing.append(name)
    assert not missing, f"add to primerl_hpc/observe/metric_catalog.py: {sorted(missing)}"


def test_every_metric_of_a_batch_is_in_the_catalog(metrics: dict[str, float]) -> None:  # noqa: F811
    assert [name for name in metrics if not is_known(name, "orchestrator")] == []


def test_every_metric_of_an_evaluation_is_in_the_catalog() -> None:
    names = eval_metrics("held-out", 2, [group(0, [rollout(1.0), rollout(0.0)], version=2, failed=1)])
    assert len(names) > 10 and [name for name in names if not is_known(name, "eval")] == []


@pytest.mark.parametrize("kind", ["dppo", "ipo", "grpo", "gspo", "cispo"])
def test_every_metric_of_a_loss_is_in_the_catalog(kind: str) -> None:
    components = pytest.importorskip("primerl_hpc.trainer.losses.step_loss")
    names = components.try_loss(TypeAdapter(Loss).validate_python({"type": kind}))
    assert [name for name in names if not is_known(name, "trainer")] == []


def test_names_are_matched_with_their_environment_and_statistic() -> None:
    assert find_metric("reward/math/solver/p90").unit == "reward"
    assert find_metric("time/step", "orchestrator").meaning != find_metric("time/step", "trainer").meaning
    assert not is_known("reward/math/solver/extra/p90") and not is_known("reward/mean", "trainer")
    with pytest.raises(KeyError, match="metric 'loss/unknown' is not in"):
        find_metric("loss/unknown")


def test_status_and_report_show_metrics_of_the_catalog() -> None:
    assert all(find_metric(name).label for name in STATUS_METRICS)
    assert all(find_metric(name, file) for _, file, names in CHARTS for name in names.values())


def test_no_name_is_listed_twice_for_a_file() -> None:
    for file in FILES:
        names = [metric.name for metric in METRICS if file in metric.files]
        assert len(names) == len(set(names))


def test_the_tables_in_the_docs_are_those_of_the_catalog() -> None:
    page = (ROOT / "docs" / "watching.md").read_text()
    begin, end = "<!-- metrics: begin -->\n", "\n<!-- metrics: end -->"
    table = page.partition(begin)[2].partition(end)[0].strip()
    assert table == markdown_table(), (
        "replace it by the output of python -m primerl_hpc.observe.metric_catalog"
    )
