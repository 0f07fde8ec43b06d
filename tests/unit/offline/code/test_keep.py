"""The copy of the code in a run directory: what it contains, who runs it, and what changes it."""

from __future__ import annotations

import os
import re
import stat
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from primerl_hpc.cli.main import cli
from primerl_hpc.common.errors import ConfigError, ExitCode
from primerl_hpc.common.files import read_json, write_json
from primerl_hpc.common.names import Role
from primerl_hpc.common.package import PACKAGE_ZIP
from primerl_hpc.launch.submit import change_job, renew_scripts
from primerl_hpc.offline.code import sources
from primerl_hpc.offline.code.keep import LIVE, CodeChoice, choose_code, code_root, complete_copies, has_copy
from primerl_hpc.offline.code.package_zip import write_package
from primerl_hpc.plan.plan import Plan, load_plan
from primerl_hpc.run.access.ownership import executed_paths
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import ROOT, captured, unusable_model

RECIPE = """\
kind: rl
name: small
model: {name: ./model, renderer: {name: chatml}}
seq_len: 64
max_steps: 3
rollouts: {sampling: {max_tokens: 16}}
environments: {train: [{id: reverse-text}]}
"""
OWN_LOSS = ("--set", "loss.type=custom", "--set", "loss.import_path=my_losses:clipped")


def submit(*more: str, name: str = "run") -> RunDir:
    words = ["submit", "recipe.yaml", "-p", "local", "--dry-run", "--run-dir", name, *more]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return RunDir(Path(name).resolve())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    unusable_model(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "my_losses.py").write_text("import my_helper\nVERSION = 1\n")
    (tmp_path / "lib" / "my_helper.py").write_text("")
    return tmp_path


@pytest.fixture
def run(here: Path) -> RunDir:
    path = f"env_by_role.trainer={{PYTHONPATH: {here / 'lib'}}}"
    return submit(*OWN_LOSS, "--set", path)


def test_the_package_is_copied_and_the_script_runs_the_copy(run: RunDir) -> None:
    package = [path for path in (ROOT / "primerl_hpc").rglob("*.py")]
    assert len(package) > 300
    with zipfile.ZipFile(run.code_copy(1) / PACKAGE_ZIP) as copy:
        names = set(copy.namelist())
        assert all(copy.read(str(path.relative_to(ROOT))) == path.read_bytes() for path in package)
    assert {f"{path.relative_to(ROOT)}c" for path in package} <= names, "compiled"
    assert any("/known_models/" in name for name in names), "data files of the package"
    assert f'export PYTHONPATH="$run_folder"/code/1/{PACKAGE_ZIP}${{PYTHONPATH' in run.job_script.read_text()
    assert str(ROOT) not in run.job_script.read_text().replace(sys.executable, "")


def test_a_run_has_few_files(run: RunDir) -> None:
    """Quotas count them."""
    files = [str(path.relative_to(run.root)) for path in run.root.rglob("*") if path.is_file()]
    assert len(files) < 30, files


def test_the_copy_is_private_and_checked_before_it_is_executed(run: RunDir) -> None:
    modes = {stat.S_IMODE(path.stat().st_mode) for path in run.code_copy(1).rglob("*.py*")}
    assert modes <= {0o600, 0o700} and stat.S_IMODE(run.code.stat().st_mode) == 0o700
    assert run.code in executed_paths(run)


def test_each_role_gets_the_modules_that_its_interpreter_finds(run: RunDir) -> None:
    manifest = read_json(run.code_copy(1) / "code.json")
    assert manifest["roles"] == {"trainer": "modules/1"}
    assert {module["name"] for module in manifest["modules"]} == {"my_losses", "my_helper"}
    code = (
        "import sys; from pathlib import Path; from primerl_hpc.plan.plan import load_plan\n"
        "from primerl_hpc.run.rundir import RunDir; from primerl_hpc.runtime.step import Launch\n"
        "from primerl_hpc.run.access.keys import renew_keys\n"
        "run = RunDir(Path(sys.argv[1])); phase = load_plan(run).phases[-1]; renew_keys(run, 1)\n"
        "for role in sys.argv[2:]:\n"
        "    process = next(p for p in phase.processes if p.role.value == role)\n"
        "    print(Launch(process, run, phase.name, 1, 0).environment.get('PYTHONPATH', 'inherited'))\n"
    )
    root = code_root(run)
    assert root is not None
    done = captured(
        [sys.executable, "-c", code, str(run.root), Role.TRAINER.value, Role.ORCHESTRATOR.value],
        env={**os.environ, "PYTHONPATH": root, "PYTHONSAFEPATH": "1"},
        cwd="/",
    )
    trainer, orchestrator = done.stdout.splitlines() or [done.stderr, ""]
    assert trainer.split(":")[:2] == [root, str(run.code_copy(1) / "modules/1")], done.stderr
    assert orchestrator == "inherited"


def test_provenance_names_the_copies_and_their_sources(run: RunDir) -> None:
    found = read_json(run.provenance)
    assert found["runs_code"] == "code/1" and has_copy(run)
    (copy,) = found["code_copies"]
    assert copy["folder"] == "code/1" and copy["package"]["source"] == str(ROOT / "primerl_hpc")
    assert copy["package"]["git"]["commit"] and copy["modules"][0]["source"].endswith("/lib/my_helper.py")


def test_the_package_of_an_environment_is_copied_without_its_tests_and_outputs(here: Path) -> None:
    package = here / "lib" / "my_env"
    for name in ("__init__.py", "prompts/system.txt", "tests/test_it.py", "outputs/big.bin", ".git/config"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("import verifiers.v1 as vf\nclass E(vf.Taskset): pass\n__all__ = ['E']\n")
    (here / "lib" / "shared").mkdir()
    (package / "data").symlink_to(here / "lib" / "shared")
    run = submit("--set", "environments.train[0].id=my-env", "--set", f"env.PYTHONPATH={here / 'lib'}")
    copied = {
        str(path.relative_to(run.code_copy(1) / "modules/1"))
        for path in run.code_copy(1).rglob("*")
        if path.is_file() and "modules" in path.parts and "__pycache__" not in path.parts
    }
    assert copied == {"my_env/__init__.py", "my_env/prompts/system.txt"}
    assert (run.code_copy(1) / "modules/1/my_env/data").readlink() == here / "lib" / "shared"


def test_live_code_writes_no_copy(here: Path) -> None:
    run = submit("--live-code")
    assert not run.code.exists() and read_json(run.provenance)["runs_code"] == LIVE
    assert f"export PYTHONPATH={ROOT}" in run.job_script.read_text()


def edit(run: RunDir, here: Path) -> Plan:
    (here / "lib" / "my_losses.py").write_text("VERSION = 2\n")
    return load_plan(run)


def test_an_edit_reaches_the_run_only_as_a_further_copy(run: RunDir, here: Path) -> None:
    before = (run.code_copy(1) / "modules/1/my_losses.py").read_text()
    assert not choose_code(run, load_plan(run), CodeChoice.NEW), "equal code is not copied again"
    plan = edit(run, here)
    assert not choose_code(run, plan, CodeChoice.KEPT) and code_root(run) == str(
        run.code_copy(1) / PACKAGE_ZIP
    )
    assert choose_code(run, plan, CodeChoice.NEW) and code_root(run) == str(run.code_copy(2) / PACKAGE_ZIP)
    assert (run.code_copy(1) / "modules/1/my_losses.py").read_text() == before
    assert (run.code_copy(2) / "modules/1/my_losses.py").read_text() == "VERSION = 2\n"
    found = read_json(run.provenance)
    assert [copy["folder"] for copy in found["code_copies"]] == ["code/1", "code/2"]
    assert found["recipe_sha256"], "the rest of the record stays"


def test_live_code_of_one_attempt_does_not_change_the_next_one(run: RunDir) -> None:
    plan = load_plan(run)
    assert choose_code(run, plan, CodeChoice.LIVE) and code_root(run) == str(ROOT)
    assert choose_code(run, plan, CodeChoice.KEPT)
    assert code_root(run) == str(run.code_copy(1) / PACKAGE_ZIP)


def test_an_incomplete_copy_is_never_executed_or_completed(run: RunDir, here: Path) -> None:
    run.code_copy(2).mkdir()
    assert complete_copies(run) == [run.code_copy(1)]
    assert choose_code(run, edit(run, here), CodeChoice.NEW)
    assert code_root(run) == str(run.code_copy(3) / PACKAGE_ZIP)


def test_the_copy_of_a_run_of_an_earlier_version_is_a_folder(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("primerl_hpc.launch.submit.check_not_running", lambda _: None)
    copy = run.code_copy(1)
    with zipfile.ZipFile(copy / PACKAGE_ZIP) as package:
        package.extractall(copy)
    (copy / PACKAGE_ZIP).unlink()
    assert code_root(run) == str(copy)
    change_job(run, ["scheduler.time=60"])
    script = run.job_script.read_text()
    assert 'export PYTHONPATH="$run_folder"/code/1${PYTHONPATH' in script
    assert re.search(r'cd "\$run_folder" && find [^|]* code/1/primerl_hpc ', script), (
        "checked before it is executed"
    )


def test_a_run_without_a_copy_stays_live(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """Run directories of versions that copied no code."""
    facts = {name: value for name, value in read_json(run.provenance).items() if "code" not in name}
    write_json(run.provenance, facts)
    run.code_copy(1).rename(run.code / "old")
    assert not has_copy(run) and code_root(run) == str(ROOT)
    assert not choose_code(run, load_plan(run), CodeChoice.KEPT)
    assert choose_code(run, load_plan(run), CodeChoice.NEW) and has_copy(run)
    renew_scripts(run, load_plan(run))
    assert not capsys.readouterr().err


def test_a_copy_without_a_module_that_this_version_starts_is_refused(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("primerl_hpc.launch.submit.check_not_running", lambda _: None)
    change_job(run, ["scheduler.time=60"])
    write_package(
        {"primerl_hpc/__init__.py": ROOT / "primerl_hpc/__init__.py"}, run.code_copy(1) / PACKAGE_ZIP
    )
    with pytest.raises(ConfigError, match=r"no module primerl_hpc\.runtime\.supervisor.*--new-code"):
        change_job(run, ["scheduler.time=60"])


@pytest.mark.parametrize("limit, value", [("MAX_BYTES", 10), ("MAX_FILES", 1)])
def test_modules_beyond_the_limit_are_refused_before_anything_is_written(
    here: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(sources, limit, value)
    words = ["submit", "recipe.yaml", "-p", "local", "--dry-run", "--run-dir", "run"]
    words += [*OWN_LOSS, "--set", f"env.PYTHONPATH={here / 'lib'}"]
    with pytest.raises(ConfigError, match=r"the limit is.*--live-code") as caught:
        CliRunner().invoke(cli, words, catch_exceptions=False)
    assert caught.value.location.endswith("/lib/my_losses.py") and not Path("run").exists()


def test_new_code_and_live_code_exclude_each_other(run: RunDir) -> None:
    done = CliRunner().invoke(cli, ["resume", str(run.root), "--new-code", "--live-code"])
    assert done.exit_code == ExitCode.USAGE and "use one" in done.output
