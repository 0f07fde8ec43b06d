"""`du`, `prune`, `archive` and `submit --overwrite`: what they count, delete, pack and refuse."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from primerl_hpc.cli.main import cli
from primerl_hpc.cluster.load import LoadedProfile, load_profile
from primerl_hpc.common.errors import DataError, ExitCode, NotFoundError, OccupiedError
from primerl_hpc.common.files import read_json, write_json, write_text
from primerl_hpc.common.names import Kind, Role
from primerl_hpc.launch.checklist import check_run
from primerl_hpc.launch.resume.rewind import rewind
from primerl_hpc.launch.storage.archive import archive_run, verify
from primerl_hpc.launch.storage.overwrite import delete_run, find_earlier, find_replaced
from primerl_hpc.launch.storage.prune import PrunePolicy, choose, delete
from primerl_hpc.launch.storage.usage import measure_run
from primerl_hpc.launch.submit import claim_run_dir, clear_run_dir, prepare_run
from primerl_hpc.plan.plan import OnExit
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import LoadedRecipe, load_recipe
from primerl_hpc.run.access.elsewhere import MARKER, delete_parts
from primerl_hpc.run.access.ownership import check_own
from primerl_hpc.run.lock import SupervisorLock
from primerl_hpc.run.registry import find_run
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import COMPLETE, STABLE
from primerl_hpc.transport.weights.delta import DeltaWeightReader
from tests.support.helpers import ROOT, make_tiny_model, unusable_sft_recipe, wait_for
from tests.unit.runtime.test_supervisor import UNTIL_STOPPED, Toy, toy  # noqa: F401 (a fixture)
from tests.unit.transport.test_weights_delta import write_full, write_link

ANOTHER_USER = 12_345
Evaluated = tuple[LoadedRecipe, LoadedProfile, Path]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A stopped run with versions 1 to 6, a checkpoint of step 4, batches, traces and two attempts."""
    run = RunDir(tmp_path / "run")
    recipe = load_recipe("reverse_text/tiny", overrides=["max_steps=9", "weights.interval=3"]).recipe
    plan = compile_plan(recipe, load_profile("local").profile, run_dir=str(run.root), python="python")
    write_json(run.plan, plan.model_dump(mode="json"))
    for step in range(1, 7):
        write_text(run.weights_step(step) / STABLE, "")
        write_text(run.weights_step(step) / "model.safetensors", "x" * 1000)
    write_text(run.checkpoint(4) / COMPLETE, "")
    write_text(run.rollouts_step(6) / STABLE, "")
    write_text(run.traces("train"), "{}\n")
    for attempt in (1, 2):
        write_text(run.attempt_logs(attempt) / "trainer-0.log", "line\n")
    run.latest_logs.symlink_to("attempt_2")
    write_text(run.control / "keys" / "attempt_2" / "api_key", "secret")
    return run


def command(*words: str, **more: str) -> Result:
    """Run a command; an exit code that it returns is ``return_value``."""
    return CliRunner().invoke(cli, words, standalone_mode=False, **more)


def test_the_size_of_a_run_counts_each_file_once(run: RunDir) -> None:
    os.link(run.traces("train"), run.root / "second-name")
    usage = measure_run(run)
    assert (usage.parts["weights"].size_bytes, usage.parts["weights"].num_files) == (6000, 12)
    assert usage.parts["checkpoints"].num_files == 1 and usage.parts["logs"].num_files == 3
    files = [path for path in run.root.rglob("*") if path.is_file() or path.is_symlink()]
    assert (
        usage.total.num_files
        == len([path for path in files if "attempt" not in str(path.parent.name)]) + 2 - 1 + 1
    )
    shown = command("du", str(run.root))
    assert "weights" in shown.output and "5.9 KiB" in shown.output


def test_parts_in_another_folder_are_counted_packed_pruned_moved_and_deleted_with_their_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORK", str(tmp_path / "work"))
    text = (ROOT / "cluster_profiles" / "local.yaml").read_text().replace("name: local", "name: here")
    text += "storage: {work: {path: $WORK/me, holds: [checkpoints, weights], purge_days: 30}}\n"
    write_text(tmp_path / "here.yaml", text)
    profile = load_profile(str(tmp_path / "here.yaml"))
    loaded = load_recipe(str(unusable_sft_recipe(tmp_path)))
    (tmp_path / "runs").mkdir()
    root = tmp_path / "runs" / "one"
    run, _ = prepare_run(loaded, profile, root)
    (home,) = (tmp_path / "work" / "me").iterdir()
    assert run.checkpoints.is_symlink() and run.weights.resolve() == home / "weights"
    assert home.stat().st_mode & 0o777 == run.root.stat().st_mode & 0o777 == 0o700
    for step in (1, 2, 3):
        write_text(run.weights_step(step) / STABLE, "")
        write_text(run.weights_step(step) / "model.safetensors", "x" * 1000)
    for step in (2, 3):
        write_text(run.checkpoint(step) / COMPLETE, "x" * 10)
    assert run.latest_checkpoint() == 3 and list((home / "checkpoints").iterdir())
    parts = measure_run(run).parts
    assert parts["weights"].size_bytes == 3000 and parts["checkpoints"].size_bytes == 20
    archive_run(run, tmp_path / "one.tar")
    with tarfile.open(tmp_path / "one.tar") as tar:
        assert {"one/checkpoints/step_2/COMPLETE", "one/weights/step_1/STABLE"} <= set(tar.getnames())
    assert {path.name for path in choose(run, PrunePolicy()).paths} == {"step_1"}
    moved = rewind(run, Kind.SFT, 2).folder
    assert moved is not None and run.latest_checkpoint() == 2
    assert (moved / "checkpoints" / "step_3" / COMPLETE).resolve().is_relative_to(home)
    assert measure_run(run).parts["superseded"].size_bytes >= 1010
    delete(choose(run, PrunePolicy(superseded=True)))
    assert not (home / "superseded").exists() and not (run.root / "superseded").exists()
    check_own(run)
    (home / "checkpoints").rename(home / "gone")
    with pytest.raises(OccupiedError, match="does not exist"):
        check_own(run)
    (home / "gone").rename(home / "checkpoints")
    (home / "checkpoints").chmod(0o777)
    with pytest.raises(OccupiedError, match="can be written by one"):
        check_own(run)
    clear_run_dir(run.root, keep_root=False)
    assert not run.root.exists() and not home.exists() and (tmp_path / "work" / "me").is_dir()


def test_only_a_folder_that_names_the_run_is_deleted_with_it(run: RunDir, tmp_path: Path) -> None:
    other = tmp_path / "other" / "checkpoints"
    other.mkdir(parents=True)
    shutil.rmtree(run.checkpoints)
    run.checkpoints.symlink_to(other)
    for owner in (None, f"{run.root}-2\n"):
        if owner is not None:
            write_text(other.parent / MARKER, owner)
        delete_parts(run)
        assert other.is_dir()
    write_text(other.parent / MARKER, f"{run.root}\n")
    delete_parts(run)
    assert not other.parent.exists()


def test_pruning_keeps_what_a_resume_and_the_recipe_need(run: RunDir) -> None:
    chosen = choose(run, PrunePolicy())
    names = {str(path.relative_to(run.root)) for path in chosen.paths}
    assert names == {f"weights/step_{step}" for step in (1, 2, 5)} | {"rollouts/step_6"}
    assert chosen.size_bytes == 3000
    declined = command("prune", str(run.root), input="n\n")
    assert "nothing was deleted" in declined.output and run.stable_weights() == [1, 2, 3, 4, 5, 6]
    assert command("prune", str(run.root), "--traces", "--old-logs", "--yes").exit_code == 0
    assert run.stable_weights() == [3, 4, 6] and run.latest_checkpoint() == 4
    assert not run.traces("train").exists() and not run.attempt_logs(1).exists()
    assert (run.latest_logs / "trainer-0.log").exists()
    delete(choose(run, PrunePolicy(permanent=True)))
    assert run.stable_weights() == [4, 6]
    assert "nothing to delete" in command("prune", str(run.root), "--permanent", "--yes").output


def test_what_cannot_be_deleted_is_an_error(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any, **_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("os.rmdir", refuse)
    done = CliRunner().invoke(cli, ["prune", str(run.root), "--yes"])
    assert isinstance(done.exception, PermissionError) and "deleted" not in done.output
    assert 1 not in run.stable_weights()  # no reader takes the rest for a version


def test_files_that_versions_share_are_counted_once_by_prune(run: RunDir) -> None:
    os.link(run.weights_step(1) / "model.safetensors", run.weights_step(2) / "twin")
    chosen = choose(run, PrunePolicy())
    assert chosen.size_bytes == 3000


def test_pruning_keeps_the_deltas_that_lead_to_a_kept_version(run: RunDir) -> None:
    for step in range(1, 7):
        delete_step = run.weights_step(step)
        run.delete_step(delete_step, STABLE)
    for version in (1, 4):
        write_full(run, version)
    for version in range(2, 8):
        write_link(run, version)
    delete(choose(run, PrunePolicy()))
    assert run.stable_weights() == [4] and run.list_steps(run.deltas, STABLE) == [5, 6, 7]
    chain = DeltaWeightReader(run).open(7, "test")
    assert [version for version, _ in chain.links] == [5, 6, 7]


def test_an_archive_contains_checksums_and_no_keys(run: RunDir, tmp_path: Path) -> None:
    path = tmp_path / "run.tar"
    first, second = (run.weights_step(step) / "tokenizer.json" for step in (5, 6))
    write_text(first, "{}")
    os.link(first, second)
    archive_run(run, path, without=("rollouts",))
    with tarfile.open(path) as tar:
        names = tar.getnames()
        sums = tar.extractfile("run/SHA256SUMS").read().decode()
    assert sums.count("/tokenizer.json") == 2
    assert "run/plan.json" in names and names[-1] == "run/SHA256SUMS"
    assert not [name for name in names if "keys" in name or "rollouts" in name]
    assert verify(path) == [] and command("archive", "--verify", str(path)).exit_code == 0
    data = bytearray(path.read_bytes())
    data[data.index(b"x" * 1000)] = ord("y")
    path.write_bytes(data)
    assert len(verify(path)) == 1
    assert command("archive", "--verify", str(path)).return_value == ExitCode.DATA
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError):
        verify(path)
    inside = command("archive", str(run.root), "--to", str(run.root / "a.tar"))
    assert isinstance(inside.exception, OccupiedError) and not (run.root / "a.tar").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_runs_of_another_user_are_refused(run: RunDir, tmp_path: Path) -> None:
    os.chown(run.root, ANOTHER_USER, ANOTHER_USER)
    for words in (("du",), ("prune", "--yes"), ("archive", "--to", str(tmp_path / "a.tar"))):
        done = command(words[0], str(run.root), *words[1:])
        assert isinstance(done.exception, OccupiedError), words
        assert "belongs to" in str(done.exception)
    with pytest.raises(OccupiedError, match="belongs to"):
        find_earlier(run.root)
    assert run.stable_weights() == [1, 2, 3, 4, 5, 6] and not (tmp_path / "a.tar").exists()


def test_a_running_run_is_neither_overwritten_nor_pruned_nor_archived(
    toy: Toy,  # noqa: F811
    tmp_path: Path,
) -> None:
    toy.add(Role.TRAINER, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    toy.start()
    wait_for(lambda: toy.events("role_started"))
    for refused in (
        lambda: find_earlier(toy.run.root),
        lambda: choose(toy.run, PrunePolicy()),
        lambda: archive_run(toy.run, tmp_path / "a.tar"),
    ):
        with pytest.raises(OccupiedError, match="this run is running"):
            refused()
    assert measure_run(toy.run).total.num_files > 3
    write_json(toy.run.stop_request, {})
    assert toy.end() == ExitCode.STOPPED
    earlier = find_earlier(toy.run.root)
    assert earlier is not None and earlier.amount.num_files > 3


def test_overwrite_deletes_nothing_without_a_yes(tmp_path: Path) -> None:
    run, recipe = RunDir(tmp_path / "runs" / "one"), unusable_sft_recipe(tmp_path)

    def submit(*words: str, **more: str) -> Result:
        return command("submit", recipe, "-p", "local", "--run-dir", str(run.root), *words, **more)

    assert submit("--dry-run").exit_code == 0, "it is prepared, and nothing is started"
    made, left = read_json(run.provenance)["time"], run.root / "weights" / "file"
    write_text(left, "x")
    assert isinstance(submit("--dry-run").exception, OccupiedError)
    for word in ("--dry-run", "--json"):
        assert isinstance(submit("--overwrite", word).exception, click.UsageError)
    declined = submit("--overwrite", input="n\n")
    assert isinstance(declined.exception, click.Abort)
    assert "an earlier run" in declined.output and " files, " in declined.output
    unanswered = submit("--overwrite", input="")
    assert isinstance(unanswered.exception, click.UsageError) and "add --yes" in str(unanswered.exception)
    assert left.exists() and read_json(run.provenance)["time"] == made
    invalid = submit("--overwrite", "--yes", "--set", "model.name=no-such-folder")
    assert invalid.exception is not None and left.exists(), "an invalid recipe deletes nothing"


@pytest.mark.parametrize("kind", ["file", "folder without a plan", "plan of something else", "link"])
def test_overwrite_refuses_what_is_no_run_directory(tmp_path: Path, kind: str, run: RunDir) -> None:
    root = tmp_path / "target"
    if kind == "file":
        root.write_text("text")
    elif kind == "link":
        root.symlink_to(run.root)
    else:
        root.mkdir()
        (root / "thesis.txt").write_text("text")
        if kind == "plan of something else":
            (root / "plan.json").write_text('{"version": 1}')
    with pytest.raises(OccupiedError, match="--overwrite deletes only"):
        find_earlier(root)
    assert root.exists()
    (tmp_path / "empty").mkdir()
    assert find_earlier(tmp_path / "empty") is None and find_earlier(tmp_path / "absent") is None


def test_overwrite_deletes_nothing_that_the_new_run_reads(tmp_path: Path) -> None:
    run, recipe = RunDir(tmp_path / "runs" / "one"), unusable_sft_recipe(tmp_path)
    words = ("submit", recipe, "-p", "local", "--run-dir", str(run.root))
    assert command(*words, "--dry-run").exit_code == 0
    write_text(run.checkpoint_side(2, "trainer") / "state.json", "{}")
    write_text(run.checkpoint(2) / COMPLETE, "")
    shutil.copytree(tmp_path / "model", run.weights_step(2))
    rows = shutil.copy(tmp_path / "rows.jsonl", run.root)
    link = tmp_path / "link"
    link.symlink_to(run.root)
    files = {path: path.stat().st_mtime_ns for path in sorted(run.root.rglob("*"))}
    for change in (
        f"checkpoint.fork.run={run.root}",
        f"model.name={run.weights_step(2)}",
        f"model.name={link / 'weights' / 'step_2'}",
        f"sft.data.path={rows}",
    ):
        refused = command(*words, "--overwrite", "--yes", "--set", change)
        assert isinstance(refused.exception, OccupiedError), change
        assert "the new run reads it" in str(refused.exception)
    assert {path: path.stat().st_mtime_ns for path in sorted(run.root.rglob("*"))} == files


@pytest.fixture
def evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluated:
    """A recipe with an evaluation after the run, a profile and a run directory."""
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "outputs" / "tiny", rows=10)
    return load_recipe("reverse_text/sft_then_evaluate"), load_profile("local"), tmp_path / "runs" / "one"


def test_overwrite_replaces_the_evaluation_of_the_earlier_run_with_it(evaluated: Evaluated) -> None:
    run, _ = prepare_run(*evaluated)
    planned = check_run(*evaluated[:2], root=run.root)
    write_text(run.weights_step(1) / "file", "x")
    with pytest.raises(OccupiedError, match="is not the evaluation of"):
        find_replaced(planned)
    assert (run.weights_step(1) / "file").exists()
    write_json(run.evaluation.job, {"parent": str(run.root)})
    replaced = find_replaced(planned)
    assert [earlier.run.root for earlier in replaced] == [run.root, run.evaluation.root]
    for earlier in replaced:
        delete_run(earlier)
    assert prepare_run(*evaluated)[0].root == run.root


CHANGES = ("os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir", "shutil.rmtree")


def end_of_child(root: Path, number: int, call: Callable[[], object]) -> int:
    """Call in a child that is killed before its change number ``number`` of files of the run; return its exit code."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    counter, code = itertools.count(1), 1

    def kill(event: str, values: tuple[Any, ...]) -> None:
        is_change = event in CHANGES or (event == "open" and int(values[2]) & (os.O_WRONLY | os.O_RDWR))
        if is_change and str(values[0]).startswith(str(root)) and next(counter) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(kill)
        call()
        code = 0
    finally:
        os._exit(code)


@pytest.mark.parametrize("distance", [pytest.param(3, marks=pytest.mark.slow), 29])
def test_a_submission_that_is_killed_at_any_step_can_be_repeated(evaluated: Evaluated, distance: int) -> None:
    """It replaces an earlier run and its evaluation; each state is a run, or is taken by the next submission."""

    def submit() -> RunDir:
        return prepare_run(*evaluated, make_room=lambda new: [*map(delete_run, find_replaced(new))])[0]

    code, is_interrupted = -signal.SIGKILL, False
    for number in itertools.count(1, distance):
        run = submit()
        write_json(run.job, {"job_id": "1"})
        write_json(run.evaluation.job, {"parent": str(run.root), "job_id": "1"})
        if (code := end_of_child(run.root, number, submit)) != -signal.SIGKILL:
            break
        if run.plan.exists():
            assert find_run(str(run.root)).job_script.exists() and run.evaluation.plan.exists()
        elif run.submission_lock.exists():
            is_interrupted = True
            with pytest.raises(NotFoundError, match="was interrupted"):
                find_run(str(run.root))
    assert code == 0 and is_interrupted


def test_one_of_two_submissions_at_once_gets_an_empty_directory(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    claim_run_dir(root, load_profile("local"))
    with pytest.raises(OccupiedError, match=r"not empty; choose another --run-dir$"):
        claim_run_dir(root, load_profile("local"))
    write_json(RunDir(root).plan, {})
    with pytest.raises(OccupiedError, match="primerl-hpc resume"):
        claim_run_dir(root, load_profile("local"))
    SupervisorLock(RunDir(root).supervisor_lock).acquire()
    with pytest.raises(OccupiedError, match="primerl-hpc status"):
        claim_run_dir(root, load_profile("local"))
