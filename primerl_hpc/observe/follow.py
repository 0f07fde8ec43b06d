"""Shows a run while it happens: what starts and dies, each step's numbers, evaluations, and a summary at the end.

Plain lines, so that it reads the same in a terminal of 80 columns and in a file. ^C ends the watching, not the run.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import click

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.metrics import with_floats
from primerl_hpc.common.names import RunState
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.tail import Tail
from primerl_hpc.observe.plot import format_clock, format_count
from primerl_hpc.observe.slurm import JobWatcher
from primerl_hpc.observe.snapshot import phase_of, real_state
from primerl_hpc.observe.summary import print_summary

POLL_S = 0.3
_EXIT = {
    RunState.DONE: ExitCode.DONE,
    RunState.STOPPED: ExitCode.STOPPED,
    RunState.CANCELLED: ExitCode.PREEMPTED,
}


class Follower:
    def __init__(self, run: RunDir, *, from_end: bool = False, to_stderr: bool = False) -> None:
        self.run, self.to_stderr = run, to_stderr
        self.plan = read_json_or_none(run.plan) or {}
        self.start = time.time()
        self.events = Tail(run.events, from_end=from_end)
        self.metrics = {
            role: Tail(run.metrics(role), from_end=from_end)
            for role in ("sft", "orchestrator", "eval", "trainer")
        }
        self.batches: dict[int, dict[str, Any]] = {}
        self.pace: list[tuple[int, float]] = []
        self.last_shown = 0.0
        self.phase: str | None = None

    def say(self, text: str) -> None:
        minutes, seconds = divmod(int(time.time() - self.start), 60)
        click.echo(f"[{minutes:02d}:{seconds:02d}] {text}", err=self.to_stderr)

    def look(self) -> None:
        """Print everything that is new."""
        for event in self.events.read():
            self._on_event(event)
        for row in self._rows("sft"):
            self._on_sft(row)
        for row in self._rows("orchestrator"):
            self.batches[row["step"]] = row
        for row in self._rows("eval"):
            self._on_eval(row)
        for row in self._rows("trainer"):
            self._on_step(row)

    def _rows(self, role: str) -> list[dict[str, Any]]:
        return [with_floats(row) for row in self.metrics[role].read()]

    # -- events --------------------------------------------------------------------------------------------------

    def _on_event(self, event: dict[str, Any]) -> None:
        process = event.get("process")
        match event["event"]:
            case "attempt_started":
                self.say(f"attempt {event['attempt']} on {event['host']}")
            case "phase_started":
                self.phase, self.pace = event["phase"], []
                resumed = event.get("resumed_from")
                after = f", goes on after step {resumed}" if resumed else ""
                self.say(f"phase {self.phase} ({event['kind']}){after}")
                self.say(f"  starts {self._roles()}")
            case "role_ready":
                where = f" at {event['url']}" if process.startswith("router") and event.get("url") else ""
                self.say(f"{process} is ready after {event['after_s']} s{where}")
            case "role_exited" if event.get("status") != "exit code 0":
                self.say(f"{process} ended: {event['status']}")
            case "engine_joined" | "engine_left":
                self.say(f"{process} {event['event'].removeprefix('engine_')} at {event['url']}")
            case "role_restarting":
                self.say(f"{process} is started again")
            case "recovery_started":
                self.say(
                    f"trainer and orchestrator go on after step {event['after_step']}: {event['message']}"
                )
            case "stop_requested" if event.get("reason") == "walltime":
                self.say(f"the job ends in {event.get('left_s', '?')} s: saving")
            case "stop_requested":
                self.say("asked to stop: saving")
            case "phase_done":
                self.say(f"phase {event['phase']} is done")
            case "run_failed":
                self.say(f"FAILED: {process}: {event.get('message')}")
            case "run_requeued":
                self.say(f"back in the queue, goes on after step {event['after_step']}")
            case "link_ended":
                self.say(f"job {event['next_job']} goes on after step {event['after_step']}")
            case "run_stopped" | "run_cancelled" | "run_done":
                self.say(event["event"].replace("_", " "))

    def _roles(self) -> str:
        """``inference ×2, router, …``"""
        roles = Counter(each["role"] for each in phase_of(self.plan, self.phase).get("processes", []))
        return ", ".join(role if count == 1 else f"{role} ×{count}" for role, count in roles.items())

    # -- numbers ---------------------------------------------------------------------------------------------------

    def _left(self, step: int, now: float) -> str:
        self.pace = [*self.pace[-20:], (step, now)]
        max_steps = self._max_steps()
        (first, begun), (last, ended) = self.pace[0], self.pace[-1]
        if last <= first:
            return ""
        return f"  {format_clock((max_steps - last) * (ended - begun) / (last - first))} left"

    def _max_steps(self) -> int:
        return int(phase_of(self.plan, self.phase).get("recipe", {}).get("max_steps") or 0)

    def _on_sft(self, row: dict[str, Any]) -> None:
        """Small SFT steps come by the dozen: one line a second or so, and the last one."""
        left, last = self._left(row["step"], row["time"]), self._max_steps()
        if row["time"] - self.last_shown < 2.0 and row["step"] != last:
            return
        self.last_shown = row["time"]
        self.say(
            f"sft {row['step']:>4}/{last}  loss {row.get('loss/mean', 0):.3f}"
            f"  {format_count(row.get('perf/throughput', 0))} tok/s{left}"
        )

    def _on_step(self, row: dict[str, Any]) -> None:
        step = row["step"]
        batch = self.batches.pop(step, {})
        reward = f"reward {batch['reward/mean']:.3f}" if "reward/mean" in batch else "reward   -  "
        age = f"age {batch['off_policy/max']:.0f}" if "off_policy/max" in batch else ""
        left = self._left(step, row["time"])
        self.say(
            f"{step:>3}/{self._max_steps()} {reward} loss {row.get('loss/mean', 0):+.4f}"
            f" KL {row.get('mismatch_kl/all/mean', 0):.0e}"
            f" {age} {format_count(row.get('perf/throughput', 0)):>5} tok/s{left}"
        )

    def _on_eval(self, row: dict[str, Any]) -> None:
        first = row["step"]
        last = row.get("eval/policy_version/max", first)  # training went on meanwhile
        policy = f"v{first}" if last <= first else f"v{first} to v{last:.0f}"
        for name, value in row.items():
            if name.startswith("eval/") and name.endswith("/reward/mean"):
                self.say(f"evaluation of policy {policy}: {name.split('/')[1]} reward {value:.3f}")


def follow_run(run: RunDir, *, quiet: bool = False, from_end: bool = False) -> int:
    """Follow to the end of the attempt; returns the exit code of the run. ^C: 0, the run goes on."""
    follower, jobs = Follower(run, from_end=from_end), JobWatcher()
    try:
        while True:
            facts = jobs.facts_of([run])
            state, message = real_state(
                run, read_json_or_none(run.state) or {}, read_json_or_none(run.job) or {}, facts
            )
            if not quiet:
                follower.look()
            if state.is_final:
                break
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        click.echo(f"\nthe run goes on; watch it again:  primerl-hpc status {run.root.name} --watch")
        return ExitCode.DONE
    if not quiet:
        follower.look()
        print_summary(run, state, message, time.time() - follower.start)
    return _EXIT.get(state, ExitCode.FAILED)
