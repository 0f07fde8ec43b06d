"""Execution of a run's script by submitit's local executor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from primerl_hpc.launch.queue import submit_script
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import PATIENCE_S, ROOT, is_alive, wait_for

SUBMIT_AND_WAIT = """\
import sys, time
from pathlib import Path
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.launch.queue import submit_script

folder = Path(sys.argv[1])
print(submit_script(RunDir(folder), folder / "job.sbatch", "local")["job_id"], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("devices", [None, "", "2,3", "GPU-5b2f,GPU-77e0"])
def test_a_local_run_sees_the_gpus_of_the_submitting_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: str | None
) -> None:
    if devices is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    script, seen = tmp_path / "job.sbatch", tmp_path / "seen"
    script.write_text(f'echo "${{CUDA_VISIBLE_DEVICES-all}}" > {seen}.new && mv {seen}.new {seen}\n')
    submit_script(RunDir(tmp_path), script, "local")
    wait_for(seen.exists, "the script to run")
    assert seen.read_text().strip() == ("all" if devices is None else devices)


# ends on the signal, as a supervisor that installs its own handlers does
SCRIPT = """\
exec {python} -c '
import signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda *_: exit(9))
with open("{folder}/go") as go, open("{folder}/done", "w") as done:
    done.write(go.read())
'
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_submitting_process_group_does_not_reach_a_local_run(
    tmp_path: Path, number: signal.Signals
) -> None:
    """^C in a terminal, timeout(1) and a closed terminal signal a complete process group."""
    os.mkfifo(tmp_path / "go")
    (tmp_path / "job.sbatch").write_text(SCRIPT.format(python=sys.executable, folder=tmp_path))
    client = subprocess.Popen(
        [sys.executable, "-c", SUBMIT_AND_WAIT, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert client.stdout is not None
    controller = psutil.Process(int(client.stdout.readline()))
    with (tmp_path / "go").open("w") as go:  # waits until the script has opened it
        (script,) = controller.children()
        os.killpg(client.pid, number)
        assert client.wait(PATIENCE_S) != 0
        client.stdout.close()
        assert is_alive(script)
        go.write("finished")
    wait_for(lambda: not is_alive(controller), "the controller to end")
    assert (tmp_path / "done").read_text() == "finished"


def test_the_job_id_of_a_local_run_ends_its_script(tmp_path: Path) -> None:
    """`cancel` of a run whose supervisor has not started signals the controller."""
    script, started = tmp_path / "job.sbatch", tmp_path / "started"
    script.write_text(f"touch {started}\nexec sleep 600\n")
    controller = psutil.Process(int(submit_script(RunDir(tmp_path), script, "local")["job_id"]))
    wait_for(started.exists, "the script to run")
    below = controller.children(recursive=True)
    controller.terminate()
    wait_for(lambda: not any(map(is_alive, [controller, *below])), "the script to end")
