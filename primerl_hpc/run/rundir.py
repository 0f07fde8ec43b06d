"""Paths of the run directory, the contract between processes. No other module builds them.

    run = RunDir(Path("runs/reverse-text-001"))
    run.weights_step(3) / STABLE

A phase before the main one (an SFT warm-up) stores its data in a folder with its name: ``run.phase("warmup")``.
Control files, logs and metrics are shared by all phases. Rules about step directories are in ``step_dirs.py``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from primerl_hpc.common.files import names_in, read_json_or_none
from primerl_hpc.common.names import MAIN_PHASE
from primerl_hpc.run.leases import is_leased, make_lease
from primerl_hpc.run.step_dirs import (
    COMPLETE,
    STABLE,
    delete_after,
    delete_dropped,
    delete_step,
    finish_checkpoint_side,
    list_steps,
)

CANCEL = "cancel"
"""Reason in control/stop when a user ends the run."""
GOAL = "goal"
"""Reason in control/stop when a run ends because its metric reached ``stop_when``."""
BUDGET = "budget"
"""Reason in control/stop when a run ends because it has used its hours (``--budget``)."""
VERSION_HEADER = "x-primerl-policy-version"
"""HTTP header of an engine's responses: the policy version that was live when the request started."""


@dataclass(frozen=True)
class RunDir:
    root: Path
    phase_name: str = MAIN_PHASE

    def phase(self, name: str) -> RunDir:
        return replace(self, phase_name=name)

    @property
    def data_root(self) -> Path:
        return self.root if self.phase_name == MAIN_PHASE else self.root / self.phase_name

    # -- frozen inputs -----------------------------------------------------------------------------
    @property
    def recipe(self) -> Path:
        return self.root / "recipe.yaml"

    @property
    def profile(self) -> Path:
        return self.root / "profile.yaml"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def provenance(self) -> Path:
        return self.root / "provenance.json"

    @property
    def submission_lock(self) -> Path:
        """Held while `submit` writes or deletes the directory; see `is_unfinished`."""
        return self.root / "submission.lock"

    @property
    def is_unfinished(self) -> bool:
        """True while `submit` writes or deletes the directory, and if it was killed then: no job has been queued."""
        return self.submission_lock.is_file() and not (self.plan.is_file() and names_in(self.control))

    @property
    def launch(self) -> Path:
        return self.root / "launch"

    @property
    def job_script(self) -> Path:
        return self.launch / "job.sbatch"

    @property
    def engines_script(self) -> Path:
        """The job array of elastic engines; exists if the run has any."""
        return self.launch / "engines.sbatch"

    @property
    def export_script(self) -> Path:
        """The export after the run; exists if the recipe has ``after.export``."""
        return self.launch / "export.sbatch"

    @property
    def code(self) -> Path:
        """Copies of the code that the run executes, numbered; see `offline.code.keep`."""
        return self.root / "code"

    def code_copy(self, number: int) -> Path:
        return self.code / str(number)

    @property
    def evaluation(self) -> RunDir:
        """The run of ``after.evaluation``, in the same parent folder."""
        return RunDir(self.root.with_name(f"{self.root.name}-evaluation"))

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    # -- control -----------------------------------------------------------------------------------
    @property
    def control(self) -> Path:
        return self.root / "control"

    @property
    def state(self) -> Path:
        return self.control / "state.json"

    @property
    def job(self) -> Path:
        """Scheduler and job ids of the run; written by the submitter."""
        return self.control / "job.json"

    @property
    def events(self) -> Path:
        return self.control / "events.jsonl"

    @property
    def advice(self) -> Path:
        """Result of the split advisor for the newest attempt; `launch.planning.advice` writes it."""
        return self.control / "advice.json"

    @property
    def failure(self) -> Path:
        return self.control / "failure.json"

    @property
    def preflight_request(self) -> Path:
        """Request for node checks; nodes write their results into the same folder."""
        return self.control / "preflight" / "request.json"

    def preflight_result(self, node: str) -> Path:
        return self.preflight_request.with_name(f"{node}.json")

    @property
    def sums_request(self) -> Path:
        """Request for the all-reduce with a known result; the nodes write their results next to it."""
        return self.preflight_request.with_name("sums.json")

    @property
    def network_request(self) -> Path:
        """Request to measure bandwidth between nodes; the nodes write their results next to it."""
        return self.preflight_request.with_name("network.json")

    @property
    def supervisor_lock(self) -> Path:
        return self.control / "supervisor.lock"

    @property
    def resume_lock(self) -> Path:
        """Held while `resume` changes the run and submits its next attempt."""
        return self.control / "resume.lock"

    @property
    def reserve(self) -> Path:
        """Disk space reserved by the supervisor for the failure report on a full disk."""
        return self.control / "reserve"

    @property
    def slurm_questions(self) -> Path:
        """Numbered questions to SLURM (`slurm.question_floor`)."""
        return self.control / "slurm_questions"

    @property
    def stop_request(self) -> Path:
        return self.control / "stop"

    @property
    def checkpoint_request(self) -> Path:
        return self.control / "checkpoint_now"

    @property
    def profile_request(self) -> Path:
        """``{"id", "steps", "ranks"}``: the next steps of these ranks of the trainer are traced."""
        return self.control / "profile.json"

    def profile_trace(self, request: str, rank: int) -> Path:
        return self.root / "profiles" / request / f"rank_{rank}.json.gz"

    def engine_traces(self, process: str) -> Path:
        """Folder into which the profiler of an engine writes."""
        return self.root / "profiles" / process

    def memory_snapshot(self, attempt: int, rank: int) -> Path:
        """Allocations of a trainer rank that ran out of GPU memory."""
        return self.root / "profiles" / f"memory-{attempt}" / f"rank_{rank}.pickle"

    @property
    def full_weights_request(self) -> Path:
        """Request for full weights of the next version; written by the orchestrator, removed by the trainer."""
        return self.control / "full_weights"

    @property
    def announcement(self) -> Path:
        """Offer of the trainer to broadcast a version; see `transport.weights.broadcast`."""
        return self.control / "broadcast" / "announcement.json"

    @property
    def broadcast_group(self) -> Path:
        """Members of the broadcast group; written by the orchestrator."""
        return self.announcement.with_name("group.json")

    def turn(self, process: str) -> Path:
        """Request of ``process`` for accelerators that engines and trainer share; see `transport.turns`."""
        return self.control / "turns" / f"{process}.json"

    @property
    def turn_grant(self) -> Path:
        """The process that may use the shared accelerators; written by the orchestrator."""
        return self.control / "turns" / "grant.json"

    def keys(self, attempt: int) -> Path:
        """Folder of the keys that protect the sockets of an attempt; see `run.access.keys`."""
        return self.control / "keys" / f"attempt_{attempt}"

    @property
    def endpoints(self) -> Path:
        return self.control / "endpoints"

    def endpoint(self, process: str) -> Path:
        """Endpoint of ``process`` (``<role>-<index>``); see `endpoints.publish_endpoint`."""
        return self.endpoints / f"{process}.json"

    def last_port(self, process: str) -> Path:
        """Port of the previous incarnation of ``process``, which is reused if free, so that the URL stays the same."""
        return self.control / "last_ports" / f"{process}.json"

    def restart_request(self, process: str) -> Path:
        """Request to restart ``process``; written by a peer, removed by the supervisor."""
        return self.control / "restart_requests" / f"{process}.json"

    def error(self, process: str) -> Path:
        """Error message and exit code of a process, because torchrun replaces every nonzero exit code with 1."""
        return self.control / "errors" / f"{process}.json"

    def outcome(self, process: str) -> Path:
        """Outcome of a process under torchrun: ``{"outcome": "stopped", "step": 12}``."""
        return self.control / "outcomes" / f"{process}.json"

    def hangs(self, process: str) -> Path:
        """Folder of ``rank_R.json``, the position of each rank of a hung trainer."""
        return self.control / "hangs" / process

    @property
    def bench_request(self) -> Path:
        """Request of benchmark mode."""
        return self.control / "bench_request.json"

    @property
    def bench_result(self) -> Path:
        return self.control / "bench_result.json"

    @property
    def ledger(self) -> Path:
        """Predicted and measured figures of each attempt."""
        return self.root / "ledger.jsonl"

    @property
    def live_version(self) -> Path:
        """``{"version": n}``: the policy version that engines serve; written by the orchestrator."""
        return self.control / "live_version.json"

    @property
    def rollout_progress(self) -> Path:
        """Numbers of rollouts in flight, finished and failed, and the last errors; by the orchestrator or evaluator."""
        return self.control / "rollouts.json"

    # -- logs and metrics --------------------------------------------------------------------------
    def attempt_logs(self, attempt: int) -> Path:
        return self.root / "logs" / f"attempt_{attempt}"

    def attempt_hosts(self, attempt: int) -> Path:
        """Host names by node index of the plan, one per line; written when an attempt starts under SLURM."""
        return self.attempt_logs(attempt) / "hosts"

    def torchrun_logs(self, attempt: int, process: str, node: int) -> Path:
        """Log folder of the ranks on one node; ``node`` counts the nodes of ``process``."""
        return self.attempt_logs(attempt) / "trainer" / "torchrun" / process / f"node_{node}"

    def job_outputs(self, job: str) -> list[Path]:
        """Return possible output files of the batch job: SLURM's, and that of submitit's local controller."""
        return [self.root / "logs" / f"slurm-{job}.out", self.launch / "submitit" / f"{job}_0_log.out"]

    def attempt_plan(self, attempt: int) -> Path:
        """Copy of plan.json as the attempt ran it."""
        return self.attempt_logs(attempt) / "plan.json"

    @property
    def latest_logs(self) -> Path:
        return self.root / "logs" / "latest"

    def metrics(self, role: str) -> Path:
        return self.root / "metrics" / f"{role}.jsonl"

    def progress(self) -> int:
        """Return a number that increases with every row of metrics, and thus with every finished step."""
        return sum(path.stat().st_size for path in (self.root / "metrics").glob("*.jsonl"))

    @property
    def scores(self) -> Path:
        """Scores of kind eval, and sft with an evaluation: one row per evaluated policy version and environment."""
        return self.root / "results" / "scores.jsonl"

    def tracker_state(self, target: str) -> Path:
        """Progress of sending to a target of tracking; see `tracking.stream`."""
        return self.control / "tracker" / f"{target}.json"

    # -- data of one phase -------------------------------------------------------------------------
    @property
    def rollouts(self) -> Path:
        return self.data_root / "rollouts"

    def rollouts_step(self, step: int) -> Path:
        return self.rollouts / f"step_{step}"

    @property
    def weights(self) -> Path:
        return self.data_root / "weights"

    def weights_step(self, step: int) -> Path:
        """Policy version ``step``: HF safetensors + manifest.json + STABLE."""
        return self.weights / f"step_{step}"

    @property
    def deltas(self) -> Path:
        return self.data_root / "deltas"

    def delta_step(self, step: int) -> Path:
        """Changes from policy version ``step`` - 1 to ``step``: a file per changed shard + manifest.json + STABLE."""
        return self.deltas / f"step_{step}"

    @property
    def checkpoints(self) -> Path:
        return self.data_root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step}"

    def fork_note(self, step: int) -> Path:
        """Origin of a checkpoint from another run: ``{"run": …, "step": …, "skip": [parts that are not restored]}``."""
        return self.checkpoint(step) / "FORK.json"

    def fork_skips(self, step: int) -> list[str]:
        return (read_json_or_none(self.fork_note(step)) or {}).get("skip", [])

    def checkpoint_side(self, step: int, side: str) -> Path:
        """``side`` is ``trainer`` or ``orchestrator``."""
        return self.checkpoint(step) / side

    def traces(self, split: str) -> Path:
        """JSON-lines file with a row per finished rollout; ``split`` is ``train`` or ``eval``."""
        return self.data_root / "traces" / f"{split}.jsonl"

    def superseded(self, name: str) -> Path:
        """Folder of what a ``resume --step`` moved away; it repeats the layout of the run directory."""
        return self.root / "superseded" / name

    # -- rules -------------------------------------------------------------------------------------
    list_steps = staticmethod(list_steps)
    delete_step = staticmethod(delete_step)
    delete_dropped = staticmethod(delete_dropped)

    def stable_weights(self) -> list[int]:
        return self.list_steps(self.weights, STABLE)

    def complete_checkpoints(self) -> list[int]:
        return self.list_steps(self.checkpoints, COMPLETE)

    def latest_checkpoint(self) -> int | None:
        """Return the highest step with a complete checkpoint; directories without a marker are ignored."""
        return max(self.complete_checkpoints(), default=None)

    def resume_point(self) -> str:
        """Return where the next attempt begins: ``after step 20``, ``after step 8 of phase warmup``, or ``from the
        beginning``."""
        phases = (read_json_or_none(self.plan) or {}).get("phases", [])
        for name in (MAIN_PHASE, *(phase["name"] for phase in reversed(phases))):
            if step := self.phase(name).latest_checkpoint():
                return f"after step {step}" + ("" if name == MAIN_PHASE else f" of phase {name}")
        return "from the beginning"

    def finish_checkpoint_side(self, step: int, side: str, sides: tuple[str, ...]) -> bool:
        """Mark ``side`` of checkpoint ``step`` as complete; True if the checkpoint is complete now."""
        return finish_checkpoint_side(self.checkpoint(step), side, sides)

    def delete_after(self, step: int) -> None:
        """Delete rollouts, weights, deltas and checkpoints after ``step``; see `step_dirs.delete_after`."""
        stable = [(folder, STABLE) for folder in (self.rollouts, self.weights, self.deltas)]
        delete_after([*stable, (self.checkpoints, COMPLETE)], step)

    # -- leases: steps are not deleted while they are read -----------------------------------------
    lease = staticmethod(make_lease)
    has_lease = staticmethod(is_leased)


def state_stamp(root: str) -> list[int] | None:
    """Return modification time in ns and size of state.json, which change when the supervisor writes it."""
    try:
        found = os.stat(f"{root}/control/state.json")
    except OSError:
        return None
    return [found.st_mtime_ns, found.st_size]
