"""Checks of the files of an ended run: rollouts are counted exactly once, engines serve the version that they state.

    assert not contradictions(run)
    stale, fresh = mismatch_with_and_without_staleness(run)

Scored rollouts (traces, `progress/rollouts`) are in a batch, were dropped as stale, were passed over, or are in the
queue of the last checkpoint. Rollouts dispatched in the last attempt finished, failed, were cancelled, or were in
flight at its end.
"""

from __future__ import annotations

import json
from collections import Counter

from primerl_hpc.common.files import read_json
from primerl_hpc.orchestrator.checkpoint.follower import load_queue, load_state
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir

SCORED = ("batch/rollouts", "off_policy/dropped", "batch/rollouts_passed_over")


def contradictions(run: RunDir) -> list[str]:
    """Return contradictions of the run up to its last checkpoint as sentences."""
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


def mismatch_with_and_without_staleness(run: RunDir) -> tuple[float, float]:
    """Return the largest mismatch KL of a batch (mean over its tokens): of all batches, and of those without staleness.

    The first grows with the staleness of a batch, which depends on how fast each side runs (0.026 was observed). The
    second shows an engine that serves other weights than those of the version that it states: at most rounding errors.
    """
    batches = read_steps(run.metrics("orchestrator"))
    mismatch = {step: row["mismatch_kl/all/mean"] for step, row in read_steps(run.metrics("trainer")).items()}
    fresh = [mismatch[step] for step, row in batches.items() if row["off_policy/max"] == 0]
    return max(mismatch.values()), max(fresh)
