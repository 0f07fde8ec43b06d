"""Whether the files of a run that has ended account for every training rollout, and for each once.

    assert not contradictions(run)

What was scored (traces, `progress/rollouts`) is in a batch, or was dropped as stale, or passed over, or still waits in the
last checkpoint's queue; what was dispatched in the last life finished, failed, was cancelled, or was in flight then.
"""

from __future__ import annotations

import json
from collections import Counter

from primerl_hpc.common.files import read_json
from primerl_hpc.common.metrics import read_steps
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.orchestrator.checkpoints import load_queue, load_state

SCORED = ("batch/rollouts", "off_policy/dropped", "batch/rollouts_passed_over")


def contradictions(run: RunDir) -> list[str]:
    """Sentences about the run up to its last checkpoint; none when all is accounted for."""
    last = run.latest_checkpoint() or 0
    state = load_state(run, last)
    batches = {step: row for step, row in read_steps(run.metrics("orchestrator")).items() if step <= last}
    traces = run.traces("train").read_bytes()[: state["traces_bytes"]].decode()
    groups = Counter(row["group"] for row in map(json.loads, traces.splitlines()) if "reward" in row)
    scored, queued = (
        state["totals"]["rollouts"],
        sum(len(each.rollouts) for each in load_queue(run, last, state)),
    )
    where = {name: sum(row[name] for row in batches.values()) for name in SCORED}
    size = read_json(run.plan)["phases"][-1]["recipe"]["rollouts"]["group_size"]
    found = []
    if list(batches) != list(range(1, last + 1)):
        found.append(f"batches {list(batches)} of {last}")
    if list(read_steps(run.metrics("trainer")))[-1] != last:
        found.append(f"the trainer's last step is not {last}")
    if sum(where.values()) + queued != scored:
        found.append(f"{scored} rollouts were scored, but {where} and {queued} wait")
    if groups.total() != scored:
        found.append(f"{scored} rollouts were scored, {groups.total()} traced")
    found += [f"group {group} has {count} rollouts" for group, count in groups.items() if count > size]
    for step, row in batches.items():
        count = {name: row[f"dispatcher/{name}"] for name in ("finished", "failed", "cancelled", "in_flight")}
        if sum(count.values()) != row["dispatcher/dispatched"]:
            found.append(f"step {step}: {row['dispatcher/dispatched']} dispatched, but {count}")
    return found
