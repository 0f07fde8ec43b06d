"""Shell completion: commands without importing them, runs, processes, profiles and keys; also in a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from primerl_hpc.cli.completion import VARIABLE
from primerl_hpc.cli.main import cli
from primerl_hpc.common.names import Role
from primerl_hpc.run.registry import register_run
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import ROOT, TOY_RECIPE, captured, make_plan, process_plan


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "math-001")
    make_plan(run.root, TOY_RECIPE, processes=[process_plan(Role.TRAINER), process_plan(Role.INFERENCE)])
    register_run(run)
    return run


@pytest.mark.parametrize(
    ("words", "incomplete", "expected"),
    [
        ([], "sta", ["status", "stacks"]),
        (["status"], "ma", ["math-001"]),
        (["top", "math-001"], "ma", ["math-001"]),
        (["logs", "math-001"], "tr", ["trainer", "trainer-0"]),
        (["logs", "math-001"], "jo", ["job"]),
        (["role"], "env", ["env-server"]),
        (["trainer"], "ma", ["math-001"]),
        (["exec", "math-001", "--role"], "inf", ["inference", "inference-0"]),
        (["submit", "x.yaml", "-p"], "h100", ["h100x64", "h100x64-pyxis", "h100x1024"]),
        (["submit"], "reverse_text/ti", ["reverse_text/tiny"]),
        (["submit", "x.yaml", "--set"], "optimizer.weight", ["optimizer.weight_decay="]),
        (
            ["submit", "x.yaml", "--profile-set"],
            "scheduler.exclu",
            ["scheduler.exclude=", "scheduler.exclusive="],
        ),
        (["resume", "math-001", "--set"], "max_s", ["max_steps="]),
        (["resume", "math-001", "--set"], "model.", []),
        (["explain"], "optimizer.weight", ["optimizer.weight_decay"]),
        (["status", "math-001"], "--wat", ["--watch"]),
        (["logs", "no-such-run"], "", []),
    ],
)
def test_the_shell_completes(run: RunDir, words: list[str], incomplete: str, expected: list[str]) -> None:
    found = BashComplete(cli, {}, "primerl-hpc", VARIABLE).get_completions(words, incomplete)
    assert sorted(item.value for item in found) == sorted(expected)


def test_names_of_commands_complete_without_importing_the_commands(run: RunDir) -> None:
    code = (
        "import sys\nfrom click.shell_completion import BashComplete\nfrom primerl_hpc.cli.main import cli\n"
        f"items = BashComplete(cli, {{}}, 'primerl-hpc', '{VARIABLE}').get_completions([], 'stat')\n"
        "assert [item.value for item in items] == ['status'] and items[0].help\n"
        "assert 'primerl_hpc.cli.status' not in sys.modules and 'pydantic' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_a_real_bash_completes_with_the_printed_script(run: RunDir, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "primerl-hpc"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom primerl_hpc.cli.main import main\nmain()\n")
    program.chmod(0o755)
    script = CliRunner().invoke(cli, ["completion", "bash"]).output
    typed = f"{script}\nCOMP_WORDS=(primerl-hpc logs math-001 tr)\nCOMP_CWORD=3\n_primerl_hpc_completion primerl-hpc\n"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{program.parent}:{os.environ['PATH']}"}
    done = captured(["bash", "-c", typed + 'echo "${COMPREPLY[@]}"'], env=environ, check=True)
    assert done.stdout.split() == ["trainer", "trainer-0"], done.stderr


def test_an_unknown_shell_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    refused = CliRunner().invoke(cli, ["completion"])
    assert refused.exit_code == 2 and "there is no completion for tcsh" in refused.output
