"""`diagnose`: known faults are recognized with their fix, the reason of a wait is explained, and the next command is
exact.
"""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.errors import ExitCode, NotFoundError
from primerl_hpc.common.files import append_json, write_json
from primerl_hpc.common.names import RunState
from primerl_hpc.observe.diagnose.diagnose import Diagnosis, diagnose, parse_outcome, render_diagnosis
from primerl_hpc.observe.diagnose.known_faults import FAULT_PATTERNS, recognize_fault
from primerl_hpc.observe.run_summary import print_summary
from primerl_hpc.recipe.explain import explain
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.registry import register_run
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.slurm.commands import UnansweredError
from primerl_hpc.slurm.reasons import explain_reason
from tests.support.slurm_rows import Slurm, outcome_row, queue_row


def is_known(key: str) -> bool:
    for root in (Recipe, Profile):
        try:
            explain(root, key)
        except NotFoundError:
            continue
        return True
    return False


def test_every_key_named_in_a_hint_exists() -> None:
    keys = {
        key for pattern in FAULT_PATTERNS for key in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", pattern.hint)
    }
    assert len(keys) > 8 and not [key for key in sorted(keys) if not is_known(key)]


@pytest.mark.parametrize(
    "line, name, hint",
    [
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has",
            "GPU memory",
            "seq_len",
        ),
        ("ValueError: No available memory for the cache blocks.", "engine memory", "gpu_memory_utilization"),
        (
            "[rank3]:[E1121 ProcessGroupNCCL.cpp:629] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL",
            "collective",
            "NCCL_SOCKET_IFNAME",
        ),
        ("OSError: [Errno 28] No space left on device: 'weights/step_3'", "full disk", "delete checkpoints"),
        ("OSError: [Errno 122] Disk quota exceeded", "disk quota", "quota"),
        (
            "OSError: [Errno 98] error while attempting to bind: address already in use",
            "port",
            "chosen again",
        ),
        (
            "ModuleNotFoundError: No module named 'flash_attn.layers'",
            "missing package",
            "install flash_attn.layers",
        ),
        (
            "ImportError: libcudart.so.12: cannot open shared object file: No such file",
            "missing library",
            "modules",
        ),
        (
            "OSError: We couldn't connect to 'https://huggingface.co' to load the files",
            "hub offline",
            "download",
        ),
        (
            "huggingface_hub.errors.GatedRepoError: 401 Client Error. Cannot access gated repo",
            "gated model",
            "license",
        ),
        (
            "OSError: models/missing is not a local folder and is not a valid model identifier listed on the hub",
            "unknown model",
            "hf auth login",
        ),
        ("pydantic_core.ValidationError: 1 validation error for ModelConfig", "configuration", "correct"),
        ("api_server.py: error: unrecognized arguments: --max-num-sek 4", "configuration", "correct"),
        ("PermissionError: [Errno 13] Permission denied: '/data/x'", "permission", "owner"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=17.3", "host memory", "scheduler.memory"),
        ("NVRM: Xid (PCI:0000:4b:00): 79, GPU has fallen off the bus.", "GPU hardware", "exclude"),
        ("slurmstepd: error: *** JOB 17 ON n1 CANCELLED AT 2026 DUE TO TIME LIMIT ***", "walltime", "margin"),
        ("slurmstepd: error: *** JOB 17 CANCELLED AT 2026 DUE TO PREEMPTION ***", "preempted", "interval"),
        ("srun: error: Node failure on n2", "lost node", "other nodes"),
        ("OSError: [Errno 116] Stale file handle", "filesystem", "site"),
        ("OSError: [Errno 24] Too many open files", "open files", "ulimit"),
        ("srun: unrecognized option '--container-image=/i.sqsh'", "unknown srun option", "--container-image"),
        ("OSError: [Errno 8] Exec format error: '/env/bin/python'", "architecture", "node.arch"),
        (
            "FATAL: could not open image /i.sif: the image's architecture (arm64) could not run on the host's (amd64)",
            "architecture",
            "build the environment or image",
        ),
        (
            "HTTPSConnectionPool(host='huggingface.co'): Max retries exceeded with url: /x (Caused by "
            "ProxyError('Unable to connect to proxy', OSError('Tunnel connection failed: 403 Forbidden')))",
            "proxy",
            "prefetch",
        ),
    ],
)
def test_a_known_fault_is_recognized(line: str, name: str, hint: str) -> None:
    known = recognize_fault("it ended", ["some line before", line, "and one after"])
    assert known is not None and known.name == name and hint in f"{known.hint} {known.what}"


def test_the_failure_message_comes_before_the_log() -> None:
    echo = "RuntimeError: [gloo] Connection closed by peer"
    known = recognize_fault("OSError: [Errno 28] No space left on device", [echo])
    assert known is not None and known.name == "full disk"
    assert recognize_fault("the loss is a teapot", ["all is well"]) is None


@pytest.mark.parametrize(
    "reason, words, is_hopeless",
    [
        ("Priority", "higher priority", False),
        ("Resources", "free nodes", False),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-4]", "down, drained or reserved", False),
        ("QOSMaxGRESPerUser", "the maximum of GPUs of your QOS for one user", False),
        ("QOSMaxGRESMinutesPerJob", "more GPU-minutes than your QOS allows for one job", True),
        ("QOSMaxWallDurationPerJobLimit", "SLURM reports", False),
        ("QOSGrpNodeLimit", "the jobs of your QOS together use the maximum of nodes", False),
        ("AssocGrpGRES", "the jobs of your account together use the maximum of GPUs", False),
        ("AssocGrpCPUMinutesLimit", "CPU-minutes", False),
        ("AssocMaxJobsLimit", "the maximum of jobs of your account", False),
        ("AssocMaxNodePerJobLimit", "more nodes than your account allows for one job", True),
        ("DependencyNeverSatisfied", "dependency can never be satisfied", True),
        ("PartitionTimeLimit", "time limit exceeds", True),
        ("SomethingNew", "SomethingNew", False),
    ],
)
def test_the_reason_of_a_waiting_job_is_explained(reason: str, words: str, is_hopeless: bool) -> None:
    found = explain_reason(reason)
    assert found is not None and words in found.text and found.is_hopeless == is_hopeless


def test_a_job_that_waits_for_nothing_has_no_reason() -> None:
    assert explain_reason("") is None and explain_reason("None") is None


# -- complete runs ---------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that ended an hour ago in its second attempt, after checkpoint 20 of 40 steps."""
    run, then = RunDir(tmp_path / "math-001"), time.time() - 3600
    phase = {"name": "main", "recipe": {"kind": "rl", "max_steps": 40}, "processes": []}
    write_json(run.plan, {"version": 1, "kind": "rl", "phases": [phase]})
    write_json(run.job, {"scheduler": "slurm", "job_id": "17", "attempt": 2, "submitted": then})
    write_json(run.state, {"attempt": 2, "state": "failed", "phase": "main", "updated": then})
    write_json(
        run.provenance, {"command": ["/venv/bin/primerl-hpc", "submit", "my recipe.yaml", "-p", "h100x64"]}
    )
    append_json(run.metrics("trainer"), {"step": 23, "time": then, "attempt": 2, "time/step": 30.0})
    run.finish_checkpoint_side(20, "trainer", ("trainer",))
    register_run(run)
    return run


@pytest.mark.parametrize(
    ("rows", "is_named"),
    [
        ([{"optim/skipped": 1.0, "loss/mean": "nan"}] * 2, True),
        ([{"optim/skipped": 1.0, "loss/mean": 0.5}] * 2, True),  # gradients
        ([{"optim/skipped": 1.0, "loss/mean": 0.5}], False),
        (
            [{"optim/skipped": 1.0, "loss/mean": 0.5, "optim/loss_scale": 2.0}] * 4,
            False,
        ),  # the search for a scale
        ([{"optim/skipped": 0.0, "loss/mean": 0.5}] * 4, False),
    ],
)
def test_repeated_steps_without_an_update_are_named(
    run: RunDir, rows: list[dict[str, Any]], is_named: bool
) -> None:
    for step, row in enumerate(rows, 24):
        append_json(run.metrics("trainer"), {"step": step, "time": time.time(), "attempt": 2, **row})
    found = diagnose(run, lambda _: "")
    text = f"{len(rows)} of the last {len(rows) + 1} steps made no update"
    assert any(text in warning for warning in found.as_json()["warnings"]) == is_named
    assert ("steps made no update" in " ".join(render_diagnosis(found, 5).split())) == is_named


def fail(run: RunDir, **values: Any) -> None:
    fault = {
        "attempt": 2,
        "role": "trainer",
        "process": "trainer-0",
        "node": "gpu-b",
        "rank": 3,
        "exit_code": 1,
        "signal": None,
        "reason": "trainer-0 exited before its work was done",
        "message": "RuntimeError: a teapot",
        "log": "/runs/math-001/logs/attempt_2/trainer.log",
        "last_lines": [f"line {number}" for number in range(40)],
    }
    write_json(run.failure, fault | values)


def look(run: RunDir, squeue: str = "", sacct: str = "") -> tuple[Diagnosis, str]:
    found = diagnose(run, Slurm(squeue, sacct))
    assert found.as_json()["next"] == found.next_command
    return found, render_diagnosis(found, 3)


def test_a_crash_names_process_node_and_exit_code_and_resumes_after_the_checkpoint(run: RunDir) -> None:
    fail(run)
    found, text = look(run, sacct=outcome_row("17", "math", "FAILED", "1:0", "gpu-[a-c]", "None"))
    assert found.can_retry is True and found.next_command == "primerl-hpc resume math-001"
    for words in (
        "failed at step 23 of 40, attempt 2",
        "trainer-0 rank 3 on gpu-b: exit code 1 (failed)",
        "a teapot",
        "FAILED, exit code 1",
        "line 39",
        "resume continues after step 20",
    ):
        assert words in text, text
    assert "line 36" not in text


def test_a_configuration_error_is_not_retried_but_submitted_again(run: RunDir) -> None:
    fail(run, exit_code=int(ExitCode.CONFIG), message="engine arguments: no such option")
    found, text = look(run)
    again = "primerl-hpc submit 'my recipe.yaml' -p h100x64"
    assert found.can_retry is False and "exit code 78 (config)" in text
    assert found.next_command == f"{again} --set checkpoint.fork.run={run.root}"
    shutil.rmtree(run.checkpoint(20))
    assert look(run)[0].next_command == again


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (ExitCode.USAGE, "error: argument --x: expected one argument"),
        (ExitCode.FAILED, "ValidationError: 1 validation error for VllmConfig Value error, kv_cache_dtype"),
        (ExitCode.FAILED, "OSError: a/b is not a local folder and is not a valid model identifier"),
    ],
)
def test_an_invalid_setting_found_by_a_role_is_not_retried(
    run: RunDir, capsys: pytest.CaptureFixture[str], code: ExitCode, message: str
) -> None:
    fail(run, process="inference-0", message=message, exit_code=code)
    found = diagnose(run, Slurm())
    assert found.can_retry is False and "try again?   no" in render_diagnosis(found, 5)
    print_summary(run, RunState.FAILED, message, 1.0)
    assert "resume" not in capsys.readouterr().out
    fail(run, process="inference-0", message="RuntimeError: no luck", exit_code=1)
    print_summary(run, RunState.FAILED, message, 1.0)
    assert "primerl-hpc resume math-001" in capsys.readouterr().out


def test_a_full_gpu_is_not_retried_unchanged(run: RunDir) -> None:
    fail(run, message="torch.OutOfMemoryError: CUDA out of memory.")
    found, text = look(run)
    assert found.can_retry is False and "the GPU is out of memory" in text and "seq_len" in text


def test_a_full_disk_is_fixed_first_and_then_resumed(run: RunDir) -> None:
    fail(run, message="OSError: [Errno 28] No space left on device")
    found, text = look(run)
    assert found.can_retry is True and "after a fix, resume continues after step 20" in text


def test_a_killed_rank_is_explained_by_the_slurm_state_of_its_step(run: RunDir) -> None:
    fail(run, exit_code=None, signal="SIGKILL", message="rank 3 was killed by signal 9 (SIGKILL)")
    sacct = outcome_row("17", "math", "FAILED", "1:0", "gpu-[a-c]", "None")
    sacct += outcome_row("17.batch", "batch", "FAILED", "1:0", "gpu-a", "")
    sacct += outcome_row("17.4", "trainer-0", "OUT_OF_MEMORY", "0:125", "gpu-b", "")
    found, text = look(run, sacct=sacct)
    assert found.known is not None and found.known.name == "host memory"
    words = " ".join(text.split())
    assert "step trainer-0 OUT_OF_MEMORY" in words
    assert "trainer-0 rank 3 on gpu-b: SIGKILL (by the kernel: out of memory)" in words


@pytest.mark.parametrize("message", ["killed by signal 9 (SIGKILL)", "killed by SIGKILL (out of memory?)"])
def test_a_kill_without_evidence_is_not_called_out_of_memory(run: RunDir, message: str) -> None:
    """The step of another process that ran out of memory is no evidence either; the second message is of an older
    version."""
    fail(run, exit_code=None, signal="SIGKILL", message=f"rank 3 was {message}")
    sacct = outcome_row("17", "math", "FAILED", "1:0", "gpu-[a-c]", "None")
    sacct += outcome_row("17.3", "inference-0", "OUT_OF_MEMORY", "0:125", "gpu-b", "")
    found, text = look(run, sacct=sacct)
    assert found.known is None
    assert "SIGKILL (sent from outside the process; the sender is unknown)" in " ".join(text.split())
    assert "memory" not in text.replace(message, "").lower()


def test_the_kernels_own_counter_is_evidence(run: RunDir) -> None:
    evidence = (
        "out of memory: the kernel killed a process of this control group 1 s ago (memory.events: oom_kill 1)"
    )
    fail(
        run,
        exit_code=None,
        signal="SIGKILL",
        out_of_memory=evidence,
        message=f"killed by signal 9 (SIGKILL); {evidence}",
    )
    found, text = look(run)
    assert found.known is not None and found.known.name == "host memory"
    assert "SIGKILL (by the kernel: out of memory)" in " ".join(text.split())


@pytest.mark.parametrize(
    "state, known",
    [
        ("TIMEOUT", "walltime"),
        ("NODE_FAIL", "lost node"),
        ("PREEMPTED", "preempted"),
        ("OUT_OF_MEMORY", "host memory"),
    ],
)
def test_a_job_that_slurm_ended_without_a_failure_report(run: RunDir, state: str, known: str) -> None:
    write_json(run.state, {"attempt": 2, "state": "running", "phase": "main", "updated": time.time() - 3600})
    facts = queue_row("17", state, "None", "", "gpu-[a-c]")
    found, text = look(run, facts, outcome_row("17", "math", state, "0:0", "gpu-[a-c]", "NodeDown"))
    assert found.snapshot.state.value == "failed" and found.known is not None and found.known.name == known
    assert found.can_retry is True and "primerl-hpc resume math-001" in text


def test_a_failure_of_an_earlier_attempt_is_not_reported(run: RunDir) -> None:
    fail(run, attempt=1, message="of long ago")
    _, text = look(run)
    assert "of long ago" not in text


def test_a_waiting_run_reports_the_reason_and_expected_start(run: RunDir) -> None:
    write_json(run.job, {"scheduler": "slurm", "job_id": "17", "attempt": 3, "submitted": time.time()})
    found, text = look(run, queue_row("17", "PENDING", "QOSMaxGRESPerUser", "2026-12-01T10:00:00", ""))
    assert found.can_retry is None and "--watch" in (found.next_command or "")
    assert "the maximum of GPUs of your QOS" in text and "2026-12-01 10:00:00" in text
    found, text = look(run, queue_row("17", "PENDING", "DependencyNeverSatisfied", "N/A", ""))
    assert found.next_command == "primerl-hpc cancel math-001" and "waiting does not help" in text


def test_a_stalled_run_is_distinguished_from_one_that_makes_progress(run: RunDir) -> None:
    write_json(run.supervisor_lock, {"host": "gpu-a", "pid": 1, "started": "1", "job": "17", "restart": "0"})
    processes = {"inference-0": {"state": "ready", "incarnation": 2, "role": "inference"}}
    state = {"attempt": 2, "state": "running", "phase": "main", "processes": processes}
    write_json(run.state, {**state, "updated": time.time()})
    queue = queue_row("17", "RUNNING", "None", "", "gpu-[a-c]")
    _, text = look(run, queue)
    assert "no new step for 1:00 h, a step took 30 s" in text
    write_json(run.state, {**state, "started": time.time() - 30})  # requeued: that step is from before
    assert "no new step" not in look(run, queue)[1]
    write_json(run.state, {**state, "started": time.time() - 1800})
    assert "no new step for 30:00 min" in look(run, queue)[1]
    append_json(run.metrics("trainer"), {"step": 24, "time": time.time(), "attempt": 2, "time/step": 30.0})
    _, text = look(run, queue)
    assert "the run is running; restarted: inference-0 (2×)" in text


def test_failed_checkpoints_of_a_running_run_are_reported(run: RunDir) -> None:
    write_json(run.supervisor_lock, {"host": "gpu-a", "pid": 1, "started": "1", "job": "17", "restart": "0"})
    write_json(run.state, {"attempt": 2, "state": "running", "phase": "main", "updated": time.time()})
    metrics = {"step": 24, "time": time.time(), "attempt": 2, "time/step": 30.0, "checkpoint/failed": 1}
    append_json(run.metrics("trainer"), metrics)
    _, text = look(run, queue_row("17", "RUNNING", "None", "", "gpu-[a-c]"))
    assert "failed checkpoints: 1, last complete checkpoint: 20" in " ".join(text.split())


def test_a_done_a_stopped_and_a_never_submitted_run_have_no_fault(run: RunDir) -> None:
    then = time.time() - 3600
    write_json(run.state, {"attempt": 2, "state": "done", "phase": "main", "updated": then})
    found, text = look(run)
    assert "nothing is wrong" in text and found.next_command is None
    write_json(run.state, {"attempt": 2, "state": "stopped", "phase": "main", "updated": then})
    found, text = look(run)
    assert "nothing failed; resume continues after step 20" in text and found.known is None
    run.job.unlink()
    run.state.unlink()
    found, text = look(run)
    assert "never submitted" in text and found.next_command == "primerl-hpc resume math-001"


def test_the_last_requeue_of_a_job_counts() -> None:
    text = outcome_row("17", "math", "NODE_FAIL", "1:0", "n1", "None") + outcome_row(
        "17.1", "t", "NODE_FAIL", "0:9", "n1", ""
    )
    text += outcome_row("17", "math", "CANCELLED by 0", "0:15", "n2", "None") + "torn\x1fline\n"
    found = parse_outcome(text, {"job_id": "17"})
    assert found is not None and (found.state, found.signal, found.step) == ("CANCELLED", 15, None)
    assert parse_outcome("", {"job_id": "17"}) is None


def test_the_end_of_another_job_does_not_explain_a_failure() -> None:
    """sacct lists all tasks of an array, and the last job that had a number."""
    own = outcome_row("17", "math", "FAILED", "1:0", "n1", "None", listed="17_4")
    other = outcome_row("18", "math", "OUT_OF_MEMORY", "0:125", "n2", "None", listed="17_3")
    other += outcome_row("18.1", "trainer-0", "OUT_OF_MEMORY", "0:125", "n2", "", listed="17_3.1")
    found = parse_outcome(own + other, {"job_id": "17"})
    assert found is not None and (found.state, found.step) == ("FAILED", None)
    later = {"job_id": "17", "name": "toy", "submitted": 0.0}  # in 1970, under another name
    assert parse_outcome(own, later) is None


@pytest.mark.parametrize(
    "reason, command, words",
    [
        ("JobHeldUser", "scontrol release 17", "scontrol release 17 releases it"),
        ("JobHeldAdmin", "primerl-hpc status math-001 --watch", "ask the site to release job 17"),
    ],
)
def test_a_held_job_is_released_not_cancelled(run: RunDir, reason: str, command: str, words: str) -> None:
    write_json(run.job, {"scheduler": "slurm", "job_id": "17", "attempt": 3, "submitted": time.time()})
    found, text = look(run, queue_row("17", "PENDING", reason, "2027-11-24T03:00:00", ""))
    text = " ".join(text.split())
    assert found.next_command == command and words in text
    assert "cancel" not in text and "2027" not in text


def test_a_slurm_that_does_not_answer_is_reported(run: RunDir) -> None:
    write_json(run.job, {"scheduler": "slurm", "job_id": "17", "attempt": 3, "submitted": time.time()})

    def silent(command: list[str]) -> str:
        raise UnansweredError(f"{command[0]} did not answer within 5 s")

    found = diagnose(run, silent)
    assert found.as_json()["slurm_trouble"] == "squeue did not answer within 5 s"
    assert "squeue did not answer within 5 s; this diagnosis uses the run's files only" in " ".join(
        render_diagnosis(found, 3).split()
    )


def test_an_unavailable_controller_delays_a_diagnosis_by_seconds(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each query has the short time limit; a command that hangs does not block."""
    monkeypatch.setattr("primerl_hpc.observe.diagnose.diagnose.SLURM_TIMEOUT_S", 0.2)
    for name in ("squeue", "sacct"):
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text("#!/bin/sh\nexec sleep 60\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    write_json(run.job, {"scheduler": "slurm", "job_id": "17", "attempt": 3, "submitted": time.time()})
    assert "squeue did not answer" in (diagnose(run).slurm_trouble or "")


def test_a_job_unknown_to_slurm_is_diagnosed_with_the_next_command(run: RunDir) -> None:
    write_json(run.job, {"scheduler": "slurm", "job_id": "17", "attempt": 3, "submitted": time.time()})
    found, text = look(run)
    assert "SLURM no longer knows job 17" in " ".join(text.split())
    assert found.next_command == "primerl-hpc resume math-001" and found.can_retry is True
