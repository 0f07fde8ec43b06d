"""`diagnose`: known faults are recognised with their mend, waiting is told in words, and the next command is exact."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.errors import ExitCode, NotFoundError
from primerl_hpc.common.files import append_json, write_json
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.slurm import SEPARATOR
from primerl_hpc.observe.diagnose import Diagnosis, diagnose, parse_verdict, tell
from primerl_hpc.observe.patterns import PATTERNS, recognise
from primerl_hpc.observe.reasons import explain_reason
from primerl_hpc.recipe.explain import explain
from primerl_hpc.recipe.schema import Recipe


def is_known(key: str) -> bool:
    for root in (Recipe, Profile):
        try:
            explain(root, key)
        except NotFoundError:
            continue
        return True
    return False


def test_every_key_that_a_mend_names_exists() -> None:
    keys = {key for each in PATTERNS for key in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", each.mend)}
    assert len(keys) > 8 and not [key for key in sorted(keys) if not is_known(key)]


@pytest.mark.parametrize(
    "line, name, mend",
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
        ("OSError: [Errno 28] No space left on device: 'weights/step_3'", "full disk", "free space"),
        ("OSError: [Errno 122] Disk quota exceeded", "disk quota", "quota"),
        ("OSError: [Errno 98] error while attempting to bind: address already in use", "port", "anew"),
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
            "licence",
        ),
        ("PermissionError: [Errno 13] Permission denied: '/data/x'", "permission", "owner"),
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=17.3",
            "host memory",
            "scheduler.memory",
        ),
        ("NVRM: Xid (PCI:0000:4b:00): 79, GPU has fallen off the bus.", "GPU hardware", "exclude"),
        ("slurmstepd: error: *** JOB 17 ON n1 CANCELLED AT 2026 DUE TO TIME LIMIT ***", "walltime", "margin"),
        ("slurmstepd: error: *** JOB 17 CANCELLED AT 2026 DUE TO PREEMPTION ***", "preempted", "interval"),
        ("srun: error: Node failure on n2", "lost node", "other nodes"),
        ("OSError: [Errno 116] Stale file handle", "filesystem", "site"),
        ("OSError: [Errno 24] Too many open files", "open files", "ulimit"),
    ],
)
def test_a_fault_with_a_face_is_recognised(line: str, name: str, mend: str) -> None:
    known = recognise("it ended", ["some line before", line, "and one after"])
    assert known is not None and known.name == name and mend in f"{known.mend} {known.what}"


def test_the_faults_own_sentence_comes_before_its_echoes() -> None:
    echo = "RuntimeError: [gloo] Connection closed by peer"
    known = recognise("OSError: [Errno 28] No space left on device", [echo])
    assert known is not None and known.name == "full disk"
    assert recognise("the loss is a teapot", ["all is well"]) is None


@pytest.mark.parametrize(
    "reason, words, is_hopeless",
    [
        ("Priority", "higher priority", False),
        ("Resources", "enough nodes", False),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-4]", "down, drained or reserved", False),
        ("QOSMaxGRESPerUser", "as many GPUs as your QOS allows for one user", False),
        ("QOSMaxGRESMinutesPerJob", "more GPU-minutes than your QOS allows for one job", True),
        ("QOSMaxWallDurationPerJobLimit", "SLURM says", False),
        ("QOSGrpNodeLimit", "all jobs of your QOS together use as many nodes", False),
        ("AssocGrpGRES", "all jobs of your account together use as many GPUs", False),
        ("AssocGrpCPUMinutesLimit", "CPU-minutes", False),
        ("AssocMaxJobsLimit", "as many jobs as your account allows", False),
        ("AssocMaxNodePerJobLimit", "more nodes than your account allows for one job", True),
        ("DependencyNeverSatisfied", "depends on", True),
        ("PartitionTimeLimit", "more time", True),
        ("SomethingNew", "SomethingNew", False),
    ],
)
def test_why_a_job_waits_is_told_in_words(reason: str, words: str, is_hopeless: bool) -> None:
    found = explain_reason(reason)
    assert found is not None and words in found.words and found.is_hopeless == is_hopeless


def test_a_job_that_waits_for_nothing_has_no_reason() -> None:
    assert explain_reason("") is None and explain_reason("None") is None


# -- whole runs --------------------------------------------------------------------------------------------------------


class Slurm:
    def __init__(self, squeue: str = "", sacct: str = "") -> None:
        self.answers = {"squeue": squeue, "sacct": sacct}

    def __call__(self, command: list[str]) -> str:
        return self.answers[command[0]]


def row(*fields: str) -> str:
    return SEPARATOR.join(fields) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """It ended an hour ago in its second attempt, after checkpoint 20 of 40 steps."""
    run, then = RunDir(tmp_path / "math-001"), time.time() - 3600
    phase = {"name": "main", "recipe": {"kind": "rl", "max_steps": 40}, "processes": []}
    write_json(run.plan, {"version": 1, "kind": "rl", "phases": [phase]})
    write_json(run.job, {"scheduler": "slurm", "job_id": "17", "attempt": 2, "submitted": then})
    write_json(run.state, {"attempt": 2, "state": "failed", "phase": "main", "updated": then})
    write_json(
        run.provenance,
        {"command": ["/venv/bin/primerl-hpc", "submit", "my recipe.yaml", "-p", "h100x64"]},
    )
    append_json(run.metrics("trainer"), {"step": 23, "time": then, "attempt": 2, "time/step": 30.0})
    run.finish_checkpoint_side(20, "trainer", ("trainer",))
    return run


def fail(run: RunDir, **values: Any) -> None:
    fault = {
        "attempt": 2,
        "role": "trainer",
        "process": "trainer-0",
        "node": "gpu-b",
        "rank": 3,
        "exit_code": 1,
        "signal": None,
        "reason": "trainer-0 ended before its work was done",
        "message": "RuntimeError: a teapot",
        "log": "/runs/math-001/logs/attempt_2/trainer.log",
        "last_lines": [f"line {number}" for number in range(40)],
    }
    write_json(run.failure, fault | values)


def look(run: RunDir, squeue: str = "", sacct: str = "") -> tuple[Diagnosis, str]:
    found = diagnose(run, Slurm(squeue, sacct))
    assert found.as_json()["next"] == found.next_command
    return found, tell(found, 3)


def test_a_crash_names_who_where_how_and_goes_on_after_the_checkpoint(run: RunDir) -> None:
    fail(run)
    found, text = look(run, sacct=row("17", "math", "FAILED", "1:0", "gpu-[a-c]", "None"))
    assert found.can_retry is True and found.next_command == "primerl-hpc resume math-001"
    for words in (
        "failed at step 23 of 40, attempt 2",
        "trainer-0 rank 3 on gpu-b: exit code 1 (failed)",
        "a teapot",
        "FAILED, exit code 1",
        "line 39",
        "resume goes on after step 20",
    ):
        assert words in text, text
    assert "line 36" not in text


def test_a_fault_of_configuration_is_not_tried_again_but_submitted_anew(run: RunDir) -> None:
    fail(run, exit_code=int(ExitCode.CONFIG), message="engine arguments: no such option")
    found, text = look(run)
    assert found.can_retry is False
    assert found.next_command == "primerl-hpc submit 'my recipe.yaml' -p h100x64"
    assert "exit code 78 (config)" in text


def test_a_full_gpu_is_not_tried_again_as_it_is(run: RunDir) -> None:
    fail(run, message="torch.OutOfMemoryError: CUDA out of memory.")
    found, text = look(run)
    assert found.can_retry is False and "the GPU's memory is full" in text and "seq_len" in text


def test_a_full_disk_is_mended_first_and_then_resumed(run: RunDir) -> None:
    fail(run, message="OSError: [Errno 28] No space left on device")
    found, text = look(run)
    assert found.can_retry is True and "after the mend, resume goes on after step 20" in text


def test_a_killed_rank_is_explained_by_slurms_word_of_its_step(run: RunDir) -> None:
    fail(run, exit_code=None, signal="SIGKILL", message="rank 3 was killed by SIGKILL (out of memory?)")
    sacct = row("17", "math", "FAILED", "1:0", "gpu-[a-c]", "None")
    sacct += row("17.batch", "batch", "FAILED", "1:0", "gpu-a", "")
    sacct += row("17.4", "trainer-0", "OUT_OF_MEMORY", "0:125", "gpu-b", "")
    found, text = look(run, sacct=sacct)
    assert found.known is not None and found.known.name == "host memory"
    words = " ".join(text.split())
    assert "step trainer-0 OUT_OF_MEMORY" in words and "out of host memory, by the scheduler" in words


@pytest.mark.parametrize(
    "state, known",
    [
        ("TIMEOUT", "walltime"),
        ("NODE_FAIL", "lost node"),
        ("PREEMPTED", "preempted"),
        ("OUT_OF_MEMORY", "host memory"),
    ],
)
def test_a_job_that_slurm_ended_without_a_last_word_of_ours(run: RunDir, state: str, known: str) -> None:
    write_json(run.state, {"attempt": 2, "state": "running", "phase": "main", "updated": time.time() - 3600})
    facts = row("17", state, "None", "", "gpu-[a-c]")
    found, text = look(run, facts, row("17", "math", state, "0:0", "gpu-[a-c]", "NodeDown"))
    assert found.snapshot.state.value == "failed" and found.known is not None and found.known.name == known
    assert found.can_retry is True and "primerl-hpc resume math-001" in text


def test_an_earlier_attempts_fault_is_not_this_ones(run: RunDir) -> None:
    fail(run, attempt=1, message="of long ago")
    _, text = look(run)
    assert "of long ago" not in text


def test_a_waiting_run_says_why_and_when(run: RunDir) -> None:
    write_json(run.job, {"scheduler": "slurm", "job_id": "17", "attempt": 3, "submitted": time.time()})
    found, text = look(run, row("17", "PENDING", "QOSMaxGRESPerUser", "2026-12-01T10:00:00", ""))
    assert found.can_retry is None and "--watch" in (found.next_command or "")
    assert "as many GPUs as your QOS allows" in text and "2026-12-01 10:00:00" in text
    found, text = look(run, row("17", "PENDING", "DependencyNeverSatisfied", "N/A", ""))
    assert found.next_command == "primerl-hpc cancel math-001" and "waiting does not help" in text


def test_a_running_run_that_stands_still_is_told_apart_from_one_that_moves(run: RunDir) -> None:
    write_json(run.supervisor_lock, {"host": "gpu-a", "pid": 1, "started": "1", "job": "17", "restart": "0"})
    processes = {"inference-0": {"state": "ready", "incarnation": 2, "role": "inference"}}
    state = {"attempt": 2, "state": "running", "phase": "main", "processes": processes}
    write_json(run.state, {**state, "updated": time.time()})
    queue = row("17", "RUNNING", "None", "", "gpu-[a-c]")
    _, text = look(run, queue)
    assert "no new step for 1:00 h, a step took 30 s" in text
    write_json(run.state, {**state, "started": time.time() - 30})  # it was requeued: that step is of before
    assert "no new step" not in look(run, queue)[1]
    write_json(run.state, {**state, "started": time.time() - 1800})
    assert "no new step for 30:00 min" in look(run, queue)[1]
    append_json(run.metrics("trainer"), {"step": 24, "time": time.time(), "attempt": 2, "time/step": 30.0})
    _, text = look(run, queue)
    assert "it is running; started again: inference-0 2 times" in text


def test_of_a_running_run_that_could_not_save_it_is_said(run: RunDir) -> None:
    write_json(run.supervisor_lock, {"host": "gpu-a", "pid": 1, "started": "1", "job": "17", "restart": "0"})
    write_json(run.state, {"attempt": 2, "state": "running", "phase": "main", "updated": time.time()})
    metrics = {"step": 24, "time": time.time(), "attempt": 2, "time/step": 30.0, "checkpoint/failed": 1}
    append_json(run.metrics("trainer"), metrics)
    _, text = look(run, row("17", "RUNNING", "None", "", "gpu-[a-c]"))
    assert "saves that failed: 1, last checkpoint: 20" in " ".join(text.split())


def test_a_done_a_stopped_and_a_never_submitted_run_have_no_fault(run: RunDir) -> None:
    then = time.time() - 3600
    write_json(run.state, {"attempt": 2, "state": "done", "phase": "main", "updated": then})
    found, text = look(run)
    assert "nothing is wrong" in text and found.next_command is None
    write_json(run.state, {"attempt": 2, "state": "stopped", "phase": "main", "updated": then})
    found, text = look(run)
    assert "nothing failed; resume goes on after step 20" in text and found.known is None
    run.job.unlink()
    run.state.unlink()
    found, text = look(run)
    assert "never submitted" in text and found.next_command == "primerl-hpc resume math-001"


def test_of_a_requeued_job_the_last_life_counts() -> None:
    text = row("17", "math", "NODE_FAIL", "1:0", "n1", "None") + row(
        "17.1", "t", "NODE_FAIL", "0:9", "n1", ""
    )
    text += row("17", "math", "CANCELLED by 0", "0:15", "n2", "None") + "torn\x1fline\n"
    found = parse_verdict(text)
    assert found is not None and (found.state, found.signal, found.step) == ("CANCELLED", 15, None)
    assert parse_verdict("") is None
