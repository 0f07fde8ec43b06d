"""A plan as text: nodes, phases, and processes with equal ones in one row."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from primerl_hpc.observe.text import wrap
from primerl_hpc.plan.plan import PhasePlan, Plan, ProcessPlan


def _nodes_in_words(plan: Plan, kind: str) -> str:
    words = []
    # the CPU partition is the first component, and shown last
    for component in sorted(plan.all_components, key=lambda component: component.is_cpu):
        number = len(component.nodes)
        if component.is_cpu:
            words.append(f"{number} of the CPU partition")
            continue
        label = f" ({component.node_type})" if component.node_type else ""
        words.append(f"{number} node(s) of {component.accelerators_per_node} {kind}{label}")
    words += [f"{plan.spare_nodes} spare"] if plan.spare_nodes else []
    words += [f"{plan.num_elastic} job(s) of one engine"] if plan.num_elastic else []
    return " + ".join(words)


def _groups(phase: PhasePlan) -> list[list[ProcessPlan]]:
    """Return the processes in order, with adjacent ones in one group that differ only in their location."""
    parts = (phase.processes, phase.elastic)
    return [list(group) for part in parts for _, group in itertools.groupby(part, _shape)]


def _shape(process: ProcessPlan) -> tuple[Any, ...]:
    return process.role, len(process.nodes), len(process.accelerators), process.on_exit


def _row(group: list[ProcessPlan], kind: str, where: str | None) -> tuple[str, str, str, str]:
    """Return the table row of a group: processes, nodes, accelerators, what their exit means."""
    first, count = group[0], len(group)
    if count == 1:
        taken = f"{kind} {ranges(first.accelerators) or '-'}"
        return first.name, where or f"on {_nodes_of(first.nodes)}", taken, first.on_exit.value
    by_node = Counter(node for process in group for node in process.nodes)
    spread = ""
    if len(first.nodes) > 1:
        spread = f", {len(first.nodes)} nodes each"
    elif len(by_node) > 1 and len(set(by_node.values())) == 1:
        spread = f", {next(iter(by_node.values()))} a node"
    number = len(first.accelerators)
    taken = f"{kind} {number} {'a node' if len(first.nodes) > 1 else 'each'}" if number else f"{kind} -"
    where = where or f"on {_nodes_of(by_node)}{spread}"
    return f"{first.role.value} ×{count}", where, taken, first.on_exit.value


def _nodes_of(nodes: Iterable[int]) -> str:
    distinct = sorted(set(nodes))
    return f"{'node' if len(distinct) == 1 else 'nodes'} {ranges(distinct)}"


def ranges(numbers: Sequence[int]) -> str:
    """Return the text ``0-2,5`` for ``(0, 1, 2, 5)``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)


def plan_lines(plan: Plan) -> list[str]:
    """Return nodes, phases and processes of a plan, and the choices that the planner made."""
    kind = "GPUs" if plan.accelerator == "gpu" else "CPU slots"
    lines = [
        f"{plan.name}: {plan.kind.value} on profile {plan.profile_name} ({plan.scheduler})",
        f"  {_nodes_in_words(plan, kind)}",
        "",
    ]
    for phase in plan.phases:
        recipe = phase.recipe
        steps = f"{recipe.max_steps} steps, " if recipe.max_steps else ""
        lines.append(f"phase {phase.name}: {recipe.kind.value}, {steps}model {phase.model_path}")
        elastic = {process.name for process in phase.elastic}
        rows = [
            _row(group, kind, "own jobs" if group[0].name in elastic else None) for group in _groups(phase)
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines += [
            "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, (*widths, 0), strict=True))
            for row in rows
        ]
        lines.append("")
    lines += [f"chosen automatically: {note}" for note in plan.notes]
    return [part for line in lines for part in wrap(line, "    ") or [""]]
