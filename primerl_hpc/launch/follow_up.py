"""Follow-up jobs of a run: an export and an evaluation, in jobs of their own that start when the run is done.

Under SLURM each depends with ``afterok`` on the run's job (on any job of a chain: one of them finishes the run), and is
removed if the run fails. A requeued run has not ended, so they keep waiting. On one machine they run after it in one
script.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primerl_hpc.common.files import read_json_or_none, write_json, write_text
from primerl_hpc.export.export import is_exported
from primerl_hpc.launch.queue import JobsTogether
from primerl_hpc.plan.plan import Plan
from primerl_hpc.run.rundir import RunDir


def queue_after(run: RunDir, plan: Plan, jobs: JobsTogether, links: Sequence[str]) -> dict[str, Any]:
    """Submit the follow-up jobs of ``links``; return the content of ``after`` in control/job.json."""
    after, found = plan.after, {}
    options = ("--dependency=" + "?".join(f"afterok:{link}" for link in links), "--kill-on-invalid-dep=yes")
    if after.export is not None and not is_exported(Path(after.export.to)):
        job = jobs.submit(run, run.export_script, *options)
        found["export"] = {"job_id": job, "to": after.export.to}
    if after.evaluation is not None:
        job = jobs.submit(run.evaluation, run.evaluation.job_script, *options)
        found["evaluation"] = {"job_id": job, "run_dir": str(run.evaluation.root)}
        _note_evaluation(run, {"scheduler": "slurm", "job_id": job})
    return found


def local_script(run: RunDir, plan: Plan) -> Path:
    """Return one script for the run and its follow-up jobs on one machine; the run's own script if it has none."""
    after = plan.after
    rest = [run.export_script] if after.export is not None else []
    rest += [run.evaluation.job_script] if after.evaluation is not None else []
    if not rest:
        return run.job_script
    path = run.launch / "all.sh"
    lines = [f"bash {shlex.quote(str(script))}" for script in (run.job_script, *rest)]
    text = "\n".join(
        ["#!/bin/bash", "# The run, then its follow-up jobs.", f"{lines[0]} || exit", *lines[1:]]
    )
    write_text(path, text + "\n", mode=0o755)
    return path


def note_local_after(run: RunDir, plan: Plan, job: dict[str, Any]) -> dict[str, Any]:
    """Like `queue_after`, for follow-up jobs in one script with the run."""
    after, found = plan.after, {}
    if after.export is not None:
        found["export"] = {"job_id": job["job_id"], "to": after.export.to}
    if after.evaluation is not None:
        found["evaluation"] = {"job_id": job["job_id"], "run_dir": str(run.evaluation.root)}
        _note_evaluation(run, job)
    return found


def _note_evaluation(run: RunDir, job: dict[str, Any]) -> None:
    attempt = int((read_json_or_none(run.evaluation.state) or {}).get("attempt", 0)) + 1
    facts = {"attempt": attempt, "parent": str(run.root), "submitted": round(time.time(), 3)}
    write_json(run.evaluation.job, {**job, **facts})
