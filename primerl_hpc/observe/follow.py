"""Follow a run (`submit --follow`): events of processes, metrics of each step, evaluations, and a summary at the end.

If nothing happens for `QUIET_S`, a line reports the current activity: rollouts in flight, processes it waits for.

The output consists of plain lines, the same in a terminal of 80 columns and in a file. ^C stops the display, not the
run.

Reading order: `follow_run` → `RunFollower.poll` → `_on_event`, `_on_progress`, `_on_step`.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import RunState
from primerl_hpc.observe.rollouts import failure_sentences, limit_sentence, progress_sentence, read_progress
from primerl_hpc.observe.run_summary import print_summary
from primerl_hpc.observe.status.job_watcher import JobWatcher
from primerl_hpc.observe.status.snapshot import phase_of, real_state, starting_processes, untrained_sentence
from primerl_hpc.observe.text import format_age, format_clock, format_count
from primerl_hpc.run.metrics import with_floats
from primerl_hpc.run.records import Tail
from primerl_hpc.run.rundir import BUDGET, GOAL, RunDir
from primerl_hpc.slurm.commands import ask

POLL_S = 0.3
OLD_S = 60.0
"""Age from which progress is shown with its age. It is written every few seconds, but the clocks of hosts differ."""
QUIET_S = 20.0
"""Time without output after which a line reports the current activity. With two queries of `SLURM_TIMEOUT_S` the output
is never silent for more than 30 s."""
SLURM_TIMEOUT_S = 4.0
_EXIT = {
    RunState.DONE: ExitCode.DONE,
    RunState.STOPPED: ExitCode.STOPPED,
    RunState.CANCELLED: ExitCode.PREEMPTED,
}


class RunFollower:
    """Prints what is new in the files of a run at each `poll`."""

    def __init__(
        self,
        run: RunDir,
        *,
        from_end: bool = False,
        to_stderr: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self.to_stderr, self.clock = run, to_stderr, clock
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
        self.printed_at = clock()
        self.num_dropped = self.step = 0
        self.failing: set[str] = set()
        self.limit: str | None = None
        self.has_shown_untrained = self.has_ended = False
        """The end of the run has been shown."""

    def print_line(self, text: str) -> None:
        minutes, seconds = divmod(int(time.time() - self.start), 60)
        click.echo(f"[{minutes:02d}:{seconds:02d}] {text}", err=self.to_stderr)
        self.printed_at = self.clock()

    def poll(self, state: RunState | None = None, message: str | None = None) -> None:
        """Print everything that is new; after `QUIET_S` without output, the current activity.

        ``state`` and ``message``: the result of `real_state`, if the caller has it.
        """
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
        progress = read_progress(self.run)
        self._on_progress(progress)
        if self.clock() - self.printed_at >= QUIET_S and not (state and state.is_final):
            for line in self._activity(state, message, progress):
                self.print_line(line)

    def _rows(self, role: str) -> list[dict[str, Any]]:
        return [with_floats(row) for row in self.metrics[role].read()]

    # -- events ------------------------------------------------------------------------------------

    def _on_event(self, event: dict[str, Any]) -> None:
        process = str(event.get("process"))
        match event["event"]:
            case "attempt_started":
                self.has_ended = False
                self.print_line(f"attempt {event['attempt']} on {event['host']}")
            case "phase_started":
                self.phase, self.pace = event["phase"], []
                resumed = event.get("resumed_from")
                after = f", continues after step {resumed}" if resumed else ""
                self.print_line(f"phase {self.phase} ({event['kind']}){after}")
                self.print_line(f"  starting {self._roles()}")
            case "role_ready":
                where = f" at {event['url']}" if process.startswith("router") and event.get("url") else ""
                self.print_line(f"{process} is ready after {event['after_s']} s{where}")
            case "node_excluded":
                spare = f"; {event['spare']} replaces it" if event.get("spare") else ""
                self.print_line(f"node {event['node']} is excluded ({event['why']}){spare}")
            case "role_hung":
                self.print_line(event["message"])
            case "role_not_ready":
                self.print_line(f"{process} was not ready after {event['after_s']} s")
            case "role_exited" if event.get("status") != "exit code 0":
                self.print_line(f"{process} exited: {event['status']}")
            case "engine_joined" | "engine_left":
                self.print_line(f"{process} {event['event'].removeprefix('engine_')} at {event['url']}")
            case "role_restarting":
                self.print_line(f"{process} is restarting")
            case "role_given_up":
                self.print_line(f"the run continues without {process}: {event['message']}")
            case "recovery_started":
                self.print_line(
                    f"trainer and orchestrator continue after step {event['after_step']}: {event['message']}"
                )
            case "stop_requested" if event.get("reason") == "walltime":
                self.print_line(f"the job ends in {event.get('left_s', '?')} s: saving a checkpoint")
            case "stop_requested" if event.get("reason") == GOAL:
                self.print_line("the metric of stop_when has reached its value: saving a checkpoint")
            case "stop_requested" if event.get("reason") == BUDGET:
                self.print_line("one more step would exceed the budget of hours: saving a checkpoint")
            case "stop_requested":
                what = "saving a checkpoint" if event.get("saves", True) else "ending without a save"
                self.print_line(f"stop requested: {what}")
            case "phase_done":
                self.print_line(f"phase {event['phase']} is done")
            case "run_failed":
                self.print_line(
                    f"FAILED: {process}: {str(event.get('message')).removeprefix(f'{process}: ')}"
                )
            case "run_requeued":
                without = f" without {', '.join(event['without'])}" if event.get("without") else ""
                self.print_line(f"back in the queue{without}, continues after step {event['after_step']}")
            case "link_ended":
                self.print_line(f"job {event['next_job']} continues after step {event['after_step']}")
            case "run_stopped" | "run_cancelled" | "run_done":
                self.has_ended = True
                self.print_line(event["event"].replace("_", " "))

    def _roles(self) -> str:
        """``inference ×2, router, …``"""
        roles = Counter(process["role"] for process in phase_of(self.plan, self.phase).get("processes", []))
        return ", ".join(role if count == 1 else f"{role} ×{count}" for role, count in roles.items())

    # -- rollouts and current activity -------------------------------------------------------------

    def _on_progress(self, progress: dict[str, Any]) -> None:
        """Print at once: the first failure of an environment, a dropped batch, a limit on concurrent episodes."""
        if (limit := limit_sentence(progress)) is not None and limit != self.limit:
            self.limit = limit
            self.print_line(limit)
        new = progress.get("failures", {}).keys() - self.failing
        for line in failure_sentences(
            {"failures": {name: progress["failures"][name] for name in sorted(new)}}
        ):
            self.print_line(line)
        self.failing |= new
        dropped = int(progress.get("dropped_batches", 0))
        if dropped > self.num_dropped:
            self.print_line(f"a batch was dropped: no rollout in it had a signal ({dropped} so far)")
        self.num_dropped = dropped

    def _activity(self, state: RunState | None, message: str | None, progress: dict[str, Any]) -> list[str]:
        written = read_json_or_none(self.run.state) or {}
        if state in (RunState.SUBMITTED, RunState.PENDING) or not written:
            return [f"waiting to start{f': {message}' if message else ''}"]
        starting = starting_processes(written, self.plan)
        waits = f"waiting for {', '.join(starting[:4])}{' …' if len(starting) > 4 else ''}"
        if not progress:
            return [waits if starting else self._position(written)]
        age_s = time.time() - float(progress.get("time", 0.0))
        age = f" ({format_age(age_s)} ago)" if age_s > OLD_S else ""
        return [
            progress_sentence(progress) + age,
            *failure_sentences(progress),
            *([waits] if starting else []),
        ]

    def _position(self, written: dict[str, Any]) -> str:
        """Return the last finished step of a run without rollouts, or the address of its router."""
        if (last := self._max_steps()) > 0:
            return f"{written.get('state', 'running')}, step {self.step} of {last} is done"
        urls = [
            process["url"]
            for name, process in written.get("processes", {}).items()
            if name.startswith("router") and process.get("url")
        ]
        return f"serving at {urls[0]}" if urls else str(written.get("state", "running"))

    # -- metrics -----------------------------------------------------------------------------------

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
        """Print at most one line every 2 s, because small SFT steps are fast, and always the last step."""
        self.step = row["step"]
        left, last = self._left(self.step, row["time"]), self._max_steps()
        if "val/initial_loss" in row:
            self.print_line(f"validation loss before the first step {row['val/initial_loss']:.3f}")
        untrained = untrained_sentence(self.run, row)
        if untrained and (not self.has_shown_untrained or self.step == last):
            self.has_shown_untrained = True
            self.print_line(untrained.partition(";")[0])
        if row["time"] - self.last_shown < 2.0 and row["step"] != last and "val/loss" not in row:
            return
        self.last_shown = row["time"]
        validation = f"  validation {row['val/loss']:.3f}" if "val/loss" in row else ""
        self.print_line(
            f"sft {row['step']:>4}/{last}  loss {row.get('loss/mean', 0):.3f}{validation}"
            f"  {format_count(row.get('perf/throughput', 0))} tok/s{left}"
        )

    def _on_step(self, row: dict[str, Any]) -> None:
        step = self.step = row["step"]
        batch = self.batches.pop(step, {})
        reward = f"reward {batch['reward/mean']:.3f}" if "reward/mean" in batch else "reward   -  "
        lag = f"lag {batch['off_policy/max']:.0f}" if "off_policy/max" in batch else ""
        left = self._left(step, row["time"])
        self.print_line(
            f"{step:>3}/{self._max_steps()} {reward} loss {row.get('loss/mean', 0):+.4f}"
            f" KL {row.get('mismatch_kl/all/mean', 0):.0e}"
            f" {lag} {format_count(row.get('perf/throughput', 0)):>5} tok/s{left}"
        )

    def _on_eval(self, row: dict[str, Any]) -> None:
        first = row["step"]
        last = row.get("eval/policy_version/max", first)  # training continues during an evaluation
        policy = f"v{first}" if last <= first else f"v{first} to v{last:.0f}"
        for name, value in row.items():
            if name.startswith("eval/") and name.endswith("/reward/mean"):
                self.print_line(f"evaluation of policy {policy}: {name.split('/')[1]} reward {value:.3f}")


def follow_run(run: RunDir, *, quiet: bool = False, from_end: bool = False) -> int:
    """Follow the run until the end of the attempt. Return its exit code; 0 after ^C, which does not stop the run."""
    follower = RunFollower(run, from_end=from_end)
    jobs = JobWatcher(partial(ask, timeout_s=SLURM_TIMEOUT_S))
    try:
        while True:
            facts = jobs.facts_of([run])
            state, message = real_state(
                run, read_json_or_none(run.state) or {}, read_json_or_none(run.job) or {}, facts
            )
            if not quiet:
                follower.poll(state, message)
            if state.is_final:
                break
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        name = shlex.quote(run.root.name)
        click.echo(f"\nthe run continues; to watch it again:  primerl-hpc status {name} --watch", err=quiet)
        return ExitCode.DONE
    if not quiet:
        follower.poll(state, message)
        if not follower.has_ended and state in _EXIT:  # the final event is written after the final state
            follower.print_line(f"run {state.value}")
        print_summary(run, state, message, time.time() - follower.start)
    return _EXIT.get(state, ExitCode.FAILED)
