"""The run directory: the contract between processes. The only module that builds its paths.

    run = RunDir(Path("runs/reverse-text-001"))
    run.weights_step(3) / "STABLE"

A phase before the main one (an SFT warm-up) keeps its data in a folder of its name: ``run.phase("warmup")``.
Control files, logs and metrics belong to the whole run and are the same for every phase.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from primerl_hpc.common.files import (
    create_exclusive,
    is_there,
    read_json_or_none,
    write_json,
    write_text,
)
from primerl_hpc.common.leases import is_leased, make_lease
from primerl_hpc.common.names import MAIN_PHASE

STABLE = "STABLE"  # marker of a complete rollouts/step_N or weights/step_N
DROPPED = "DROPPED"  # marker instead of STABLE: nobody new may read it, but somebody still does
COMPLETE = "COMPLETE"  # marker of a checkpoint whose both sides are whole
SIDE_DONE = "DONE"  # marker inside one side of a checkpoint
VERSION_HEADER = (
    "x-primerl-policy-version"  # of every answer of an engine: the version that was live at its start
)
_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class RunDir:
    root: Path
    phase_name: str = MAIN_PHASE

    def phase(self, name: str) -> RunDir:
        return replace(self, phase_name=name)

    @property
    def data_root(self) -> Path:
        return self.root if self.phase_name == MAIN_PHASE else self.root / self.phase_name

    # -- what was asked, frozen ------------------------------------------------------------------------------
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
    def launch(self) -> Path:
        return self.root / "launch"

    @property
    def evaluation(self) -> RunDir:
        """The run of ``after.evaluation``, beside this one."""
        return RunDir(self.root.with_name(f"{self.root.name}-evaluation"))

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    # -- control -----------------------------------------------------------------------------------------------
    @property
    def control(self) -> Path:
        return self.root / "control"

    @property
    def state(self) -> Path:
        return self.control / "state.json"

    @property
    def job(self) -> Path:
        """Which job of which scheduler runs this attempt; written by the submitter."""
        return self.control / "job.json"

    @property
    def events(self) -> Path:
        return self.control / "events.jsonl"

    @property
    def failure(self) -> Path:
        return self.control / "failure.json"

    @property
    def preflight_request(self) -> Path:
        """What the nodes are asked; they answer beside it."""
        return self.control / "preflight" / "request.json"

    def preflight_result(self, node: str) -> Path:
        return self.preflight_request.with_name(f"{node}.json")

    @property
    def supervisor_lock(self) -> Path:
        return self.control / "supervisor.lock"

    @property
    def reserve(self) -> Path:
        """Space that the supervisor keeps for its last words on a full disk."""
        return self.control / "reserve"

    @property
    def stop_request(self) -> Path:
        return self.control / "stop"

    @property
    def checkpoint_request(self) -> Path:
        return self.control / "checkpoint_now"

    @property
    def full_weights_request(self) -> Path:
        """A wish that the trainer write its policy version whole; written by the orchestrator, removed by the trainer."""
        return self.control / "full_weights"

    @property
    def announcement(self) -> Path:
        """What the trainer can send to a group; see `transport.weights_broadcast`."""
        return self.control / "broadcast" / "announcement.json"

    @property
    def broadcast_group(self) -> Path:
        """Who will receive it; written by the orchestrator."""
        return self.announcement.with_name("group.json")

    @property
    def api_key(self) -> Path:
        return self.control / "api_key"

    @property
    def endpoints(self) -> Path:
        return self.control / "endpoints"

    def endpoint(self, process: str) -> Path:
        """``process`` is ``<role>-<index>``; the file says who listens where (see `publish_endpoint`)."""
        return self.endpoints / f"{process}.json"

    def last_port(self, process: str) -> Path:
        """The port that ``process`` had in its last life; it takes it again where it is free, so its URL stays."""
        return self.control / "last_ports" / f"{process}.json"

    def restart_request(self, process: str) -> Path:
        """A wish that the supervisor restart ``process``; written by a peer, removed by the supervisor."""
        return self.control / "restart_requests" / f"{process}.json"

    def error(self, process: str) -> Path:
        """The sentence and exit code a process ends with: torchrun turns every code into 1."""
        return self.control / "errors" / f"{process}.json"

    def outcome(self, process: str) -> Path:
        """How a process under torchrun ended, in its own words: ``{"outcome": "stopped", "step": 12}``."""
        return self.control / "outcomes" / f"{process}.json"

    def hangs(self, process: str) -> Path:
        """``rank_R.json``: where each rank of a hung trainer was."""
        return self.control / "hangs" / process

    @property
    def bench_request(self) -> Path:
        """What benchmark mode is asked; its result is beside it."""
        return self.control / "bench_request.json"

    @property
    def bench_result(self) -> Path:
        return self.control / "bench_result.json"

    @property
    def live_version(self) -> Path:
        """``{"version": n}``: the policy version that engines serve now; written by the orchestrator."""
        return self.control / "live_version.json"

    # -- logs and metrics --------------------------------------------------------------------------------------
    def attempt_logs(self, attempt: int) -> Path:
        return self.root / "logs" / f"attempt_{attempt}"

    def attempt_hosts(self, attempt: int) -> Path:
        """Host names by node index of the plan, a line each; written when the attempt starts under SLURM."""
        return self.attempt_logs(attempt) / "hosts"

    def torchrun_logs(self, attempt: int, process: str, node: int) -> Path:
        """Where the ranks of one node write; ``node`` counts the nodes of ``process``."""
        return self.attempt_logs(attempt) / "trainer" / "torchrun" / process / f"node_{node}"

    def job_outputs(self, job: str) -> list[Path]:
        """What the batch job printed: SLURM's file, or the one of submitit's local controller. May not be there yet."""
        return [self.root / "logs" / f"slurm-{job}.out", self.launch / "submitit" / f"{job}_0_log.out"]

    @property
    def latest_logs(self) -> Path:
        return self.root / "logs" / "latest"

    def metrics(self, role: str) -> Path:
        return self.root / "metrics" / f"{role}.jsonl"

    def progress(self) -> int:
        """A number that grows with every row of metrics that any role writes, that is with every finished step."""
        return sum(path.stat().st_size for path in (self.root / "metrics").glob("*.jsonl"))

    @property
    def scores(self) -> Path:
        """Of a run of kind eval: a row per policy version and environment that is done; written by the evaluator."""
        return self.root / "results" / "scores.jsonl"

    @property
    def tracker_offsets(self) -> Path:
        """How far into each metrics file the tracker has come."""
        return self.control / "tracker.json"

    # -- data of one phase ---------------------------------------------------------------------------------------
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
        """What changed from policy version ``step`` - 1 to ``step``: a file per changed shard + manifest.json + STABLE."""
        return self.deltas / f"step_{step}"

    @property
    def checkpoints(self) -> Path:
        return self.data_root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step}"

    def fork_note(self, step: int) -> Path:
        """In a checkpoint that came from another run: ``{"run": …, "step": …, "skip": [parts not to take over]}``."""
        return self.checkpoint(step) / "FORK.json"

    def fork_skips(self, step: int) -> list[str]:
        return (read_json_or_none(self.fork_note(step)) or {}).get("skip", [])

    def checkpoint_side(self, step: int, side: str) -> Path:
        """``side`` is ``trainer`` or ``orchestrator``."""
        return self.checkpoint(step) / side

    def traces(self, split: str) -> Path:
        """``split`` is ``train`` or ``eval``: a JSONL line per finished rollout."""
        return self.data_root / "traces" / f"{split}.jsonl"

    # -- rules ---------------------------------------------------------------------------------------------------
    def list_steps(self, folder: Path, marker: str) -> list[int]:
        """Steps under ``folder`` whose marker exists, ascending."""
        try:
            names = [entry.name for entry in folder.iterdir()]
        except FileNotFoundError:
            return []
        steps = [int(match[1]) for name in names if (match := _STEP.fullmatch(name))]
        return sorted(step for step in steps if is_there(folder / f"step_{step}" / marker))

    def stable_weights(self) -> list[int]:
        return self.list_steps(self.weights, STABLE)

    def complete_checkpoints(self) -> list[int]:
        return self.list_steps(self.checkpoints, COMPLETE)

    def latest_checkpoint(self) -> int | None:
        """The highest *complete* step; a newer directory without its marker does not count."""
        return max(self.complete_checkpoints(), default=None)

    def finish_checkpoint_side(self, step: int, side: str, sides: tuple[str, ...]) -> bool:
        """Say that ``side`` of checkpoint ``step`` is whole (its files are already fsynced).

        Whoever comes last of ``sides`` writes COMPLETE; True when the checkpoint is complete now.
        """
        write_text(self.checkpoint_side(step, side) / SIDE_DONE, "")
        if all(is_there(self.checkpoint_side(step, each) / SIDE_DONE) for each in sides):
            write_text(self.checkpoint(step) / COMPLETE, "")
            return True
        return False

    def delete_step(self, path: Path, marker: str) -> None:
        """Remove a step directory marker first, so that a reader never takes a half-deleted one for whole."""
        (path / marker).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)

    def delete_after(self, step: int) -> None:
        """Drop what an earlier life wrote beyond ``step``: rollouts, weights and checkpoints of the lost future.

        Before it, what has no marker: that life died while it deleted it, and nobody would look at it again.
        What is leased (engines outlive a recovery in place) only loses its marker; see `delete_dropped`.
        """
        for folder, marker in (
            (self.rollouts, STABLE),
            (self.weights, STABLE),
            (self.deltas, STABLE),
            (self.checkpoints, COMPLETE),
        ):
            if not folder.is_dir():
                continue
            for entry in folder.iterdir():
                match = _STEP.fullmatch(entry.name)
                is_kept = match and int(match[1]) <= step and is_there(entry / marker)
                if is_kept or not (match or entry.name.endswith(".tmp")):
                    continue
                if self.has_lease(entry):
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(entry / marker, entry / DROPPED)
                else:
                    self.delete_step(entry, marker)

    def delete_dropped(self, folder: Path) -> None:
        """Remove what `delete_after`, or a writer of the same step, had to leave in ``folder`` and nobody reads any more."""
        for step in self.list_steps(folder, DROPPED):
            path = folder / f"step_{step}"
            if not self.has_lease(path):
                self.delete_step(path, DROPPED)
        for path in folder.glob("step_*.*.tmp"):
            if not self.has_lease(path.with_name(path.name.split(".")[0])):
                shutil.rmtree(path, ignore_errors=True)

    # -- leases: nothing is deleted while somebody reads it --------------------------------------------------------
    lease = staticmethod(make_lease)
    has_lease = staticmethod(is_leased)


def state_stamp(root: str) -> list[int] | None:
    """Modification time in ns and size of a run's state.json: differs once its supervisor has written again."""
    try:
        found = os.stat(f"{root}/control/state.json")
    except OSError:
        return None
    return [found.st_mtime_ns, found.st_size]


# -- endpoints ---------------------------------------------------------------------------------------------------------


def publish_endpoint(run_dir: RunDir, process: str, url: str, **details: Any) -> None:
    """Say where ``process`` listens, after the port is bound. ``url``: ``http://…`` or ``tcp://…``.

    The file also holds the incarnation, so that a reader can tell a restarted process from the old one.
    """
    import socket

    from primerl_hpc.common import env

    write_json(
        run_dir.endpoint(process),
        {
            "process": process,
            "url": url,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "attempt": env.attempt(),
            "incarnation": env.incarnation(),
            **details,
        },
    )


def request_restart(run_dir: RunDir, process: str, incarnation: int, reason: str) -> None:
    """Ask the supervisor for a new life of ``process``, whose present one is no good to its peers."""
    asked = {"process": process, "incarnation": incarnation, "reason": reason, "time": time.time()}
    write_json(run_dir.restart_request(process), asked)


def rendezvous_name(process: str) -> str:
    """Name of the endpoint at which the tasks of a process over several nodes meet."""
    return f"rdzv-{process}"


def forget_endpoints(run_dir: RunDir, process: str) -> None:
    """Remove what a process that has ended had published."""
    for name in (process, rendezvous_name(process)):
        run_dir.endpoint(name).unlink(missing_ok=True)


def read_endpoint(run_dir: RunDir, process: str) -> dict[str, Any] | None:
    """The published endpoint, or None while there is none (not started, or its process died)."""
    return read_json_or_none(run_dir.endpoint(process))


def read_endpoints(run_dir: RunDir, role: str) -> dict[str, dict[str, Any]]:
    """All published endpoints of a role by process name."""
    found = {}
    for path in sorted(run_dir.endpoints.glob(f"{role}-*.json")):
        if (endpoint := read_json_or_none(path)) is not None:
            found[path.stem] = endpoint
    return found


def ensure_api_key(run_dir: RunDir) -> str:
    """The run's random key for engines, made on first use in a 0600 file. Never part of plan, script or log."""
    create_exclusive(run_dir.api_key, secrets.token_urlsafe(32), mode=0o600)
    return run_dir.api_key.read_text().strip()
