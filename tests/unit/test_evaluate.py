"""Evaluations as runs: what is asked, what is refused before anything starts, what is missing, and how scores look."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file, save_file

from primerl_hpc.cli.main import cli
from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.errors import (
    ConfigError,
    DataError,
    ExitCode,
    NotFoundError,
    OccupiedError,
    PrimerlError,
)
from primerl_hpc.common.files import append_json, read_json, read_jsonl, write_json
from primerl_hpc.common.lock import process_start_time
from primerl_hpc.common.names import MAIN_PHASE, RunState
from primerl_hpc.common.rundir import STABLE, RunDir
from primerl_hpc.common.scores import read_scores, write_score
from primerl_hpc.launch.evaluate import EvalRequest, check_same, load_evaluation, missing_scores
from primerl_hpc.launch.submit import prepare_run
from primerl_hpc.observe.scores import score_text, write_figure
from primerl_hpc.orchestrator.env_client import external_sampling_config
from primerl_hpc.orchestrator.evaluate import Versions, is_run_over
from primerl_hpc.orchestrator.traces import keep_rows
from primerl_hpc.plan.types import Plan, load_plan
from primerl_hpc.recipe.evaluation_schema import Evaluation
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.recipe.rollout_schema import Sampling
from primerl_hpc.transport.weights_filesystem import manifest_fault, write_blank_adapter
from tests.sbatch import read_directives
from tests.unit.test_cli import folder, tree  # noqa: F401

EVAL = "environments: {eval: [{id: reverse-text, name: held-out, samples: 2}]}\nrollouts: {sampling: {max_tokens: 12}}\n"


def primerl(*words: str) -> Result:
    """``primerl-hpc …`` in this process: dozens of interpreters would take minutes."""
    return CliRunner().invoke(cli, list(words))


def add_weights(weights: Path, *steps: int) -> None:
    for step in steps:
        (weights / f"step_{step}").mkdir(parents=True)
        (weights / f"step_{step}" / STABLE).touch()


@pytest.fixture
def trained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:  # noqa: F811
    """An SFT run that has kept versions 10 and 20; its folder is where commands are typed."""
    monkeypatch.chdir(folder)
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("max_steps: 3", "max_steps: 20") + EVAL)
    run, _ = prepare_run(load_recipe("recipe.yaml"), load_profile("local"), Path("run"))
    add_weights(run.weights, 10, 20)
    return run


def prepare(*words: str, run_dir: str = "scored") -> Plan:
    done = primerl("eval", "run", "--dry-run", "--run-dir", run_dir, *words)
    assert done.exception is None, done.exception
    return load_plan(RunDir(Path(run_dir).resolve()))


def score(run: RunDir, step: int, label: str = "held-out", **more: float) -> None:
    values = {
        "tasks": 4,
        "rollouts": 8,
        "errors": 0,
        "avg@2": 0.5,
        "pass@1": 0.5,
        "pass@2": 0.75,
        "pass^2": 0.25,
    }
    write_score(
        run, step, label, {f"eval/{label}/{name}": value for name, value in {**values, **more}.items()}
    )


# -- what is asked -------------------------------------------------------------------------------------------------------


def test_versions_are_the_base_the_asked_ones_or_every_nth_and_the_last():
    there = [10, 20, 25, 30, 37]
    assert Evaluation(weights="w").versions(there) == [0, *there]
    assert Evaluation(weights="w", steps=(30, 10), base=False).versions(there) == [10, 30]
    assert Evaluation(weights="w", every=20).versions(there) == [0, 20, 37]
    assert Evaluation(weights="w", every=20).versions(there, is_over=False) == [0, 20]
    assert Evaluation().versions([]) == [0]


def test_a_dry_run_shows_the_folder_that_results_would_go_to_and_writes_nothing(trained: RunDir) -> None:
    before = tree(trained.root.parent)
    plan = json.loads(primerl("eval", "run", "--dry-run", "--json").output)["plan"]
    assert plan["run_dir"] == str(trained.evaluation.root) and tree(trained.root.parent) == before
    prepare("--samples", "8", run_dir=str(trained.evaluation.root))
    score(trained.evaluation, 10)
    refused = primerl("eval", "run", "--dry-run").exception  # as it would be without --dry-run
    assert isinstance(refused, OccupiedError) and "held-out" in str(refused)


def test_a_runs_model_weights_and_environments_are_taken_from_its_plan(trained: RunDir) -> None:
    plan = prepare(
        "--steps", "20", "--env", "held-out", "--env", "alphabet-sort", "--samples", "4", "--replicas", "2"
    )
    (phase,) = plan.phases
    assert phase.model_path == str(trained.root.parent / "model")
    settings = phase.recipe.evaluation
    assert settings is not None
    assert (settings.weights, settings.steps, settings.base) == (str(trained.weights), (20,), True)
    assert [(each.label, each.samples) for each in phase.recipe.environments.eval] == [
        ("held-out", 4),
        ("alphabet-sort", 4),
    ]
    assert phase.recipe.rollouts.sampling.max_tokens == 12
    roles = [process.role.value for process in phase.processes]
    assert (
        roles.count("inference") == roles.count("env_server") == 2
        and "evaluator" in roles
        and "trainer" not in roles
    )


def test_an_environment_that_is_named_twice_is_evaluated_once(trained: RunDir) -> None:
    words = ("--env", "alphabet-sort", "--env", "held-out", "--env", "alphabet-sort")
    labels = [each.label for each in prepare(*words).phases[0].recipe.environments.eval]
    assert labels == ["alphabet-sort", "held-out"]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ([""], "environment name ''"),
        (["x y"], "environment name 'x y'"),
        (["a/same", "b/same"], "two environments"),
    ],
)
def test_an_environment_without_a_name_of_its_own_is_refused(
    trained: RunDir, names: list[str], says: str
) -> None:
    done = primerl("eval", "run", "--dry-run", *(word for name in names for word in ("--env", name)))
    assert isinstance(done.exception, ConfigError) and f"--env: {says}" in str(done.exception)


def test_a_plan_that_another_version_wrote_or_somebody_changed_is_refused(trained: RunDir) -> None:
    plan = read_json(trained.plan)
    for changed in (plan | {"surprise": 1}, plan | {"version": 0}, [plan]):
        write_json(trained.plan, changed)
        with pytest.raises(DataError, match="another primerl-hpc"):
            load_plan(trained)


@pytest.mark.parametrize(
    "words", [("eval", "run", "--steps", "²"), ("status", "--watch", "--interval", "-1")], ids=" ".join
)
def test_numbers_that_are_none_are_a_usage_error(trained: RunDir, words: tuple[str, ...]) -> None:
    assert primerl(*words).exit_code == ExitCode.USAGE


def test_a_model_elsewhere_needs_no_engines_and_no_model_folder(trained: RunDir, monkeypatch) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    url = ("--base-url", "http://host:1/v1", "--model", "big", "--key-variable", "A_KEY")
    plan = prepare(*url, run_dir="elsewhere")
    (phase,) = plan.phases
    assert [process.role.value for process in phase.processes] == ["env_server", "evaluator"]
    assert phase.model_path == "big"
    everything = [path for path in (trained.root.parent / "elsewhere").rglob("*") if path.is_file()]
    assert everything and not any("secret" in path.read_text() for path in everything)


def test_a_job_without_engines_asks_for_no_gpus_and_goes_to_the_cpu_partition(
    trained: RunDir, monkeypatch
) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    url = ("--base-url", "http://host:1/v1", "--model", "big", "--key-variable", "A_KEY", "-p", "h100x64")

    def script(name: str, *words: str) -> str:
        return (Path(prepare(*url, *words, run_dir=name).run_dir) / "launch" / "job.sbatch").read_text()

    assert "--gres" not in (plain := script("plain")) and "--partition=gpu" in plain
    cpu = ("--profile-set", "cpu_partition={partition: milan, cores: 4, memory: 8G}")
    there = dict(read_directives(script("there", *cpu)))
    assert (there["partition"], there["cpus-per-task"], there["mem"]) == ("milan", "4", "8G")
    assert dict(read_directives(script("named", *cpu, "--partition", "mine")))["partition"] == "mine"
    of_gpu_nodes = ("scheduler.memory_per_gpu=10G", "scheduler.gres=[gpu:8]", "scheduler.reservation=class")
    (trained.root.parent / "site.yaml").write_text(
        load_profile("h100x64", overrides=[*of_gpu_nodes, "scheduler.memory=null"]).text
    )
    elsewhere = dict(read_directives(script("mine", *cpu, "-p", "site.yaml")))
    assert elsewhere["mem"] == "8G" and not {"mem-per-gpu", "gres", "reservation"} & elsewhere.keys()
    staying = dict(read_directives(script("staying", "-p", "site.yaml")))
    assert staying["reservation"] == "class" and not {"mem-per-gpu", "gres"} & staying.keys()


def test_a_recipe_of_a_model_elsewhere_is_submitted_without_gpus_too(
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("A_KEY", "any")
    recipe = folder / "elsewhere.yaml"
    recipe.write_text(
        "kind: eval\nname: elsewhere\nmodel: {name: big}\nenvironments: {eval: [{id: reverse-text}]}\n"
        "evaluation: {external: {base_url: 'http://host:1/v1', key_variable: A_KEY}}\n"
    )
    words = ("submit", str(recipe), "-p", "h100x64", "--dry-run", "--json")
    cpu = ("--profile-set", "cpu_partition={partition: milan, cores: 4, memory: 8G}")
    done = json.loads(primerl(*words, *cpu).output)
    directives = dict(read_directives(done["script"]))
    assert (directives["partition"], directives["cpus-per-task"]) == ("milan", "4")
    assert "gres" not in directives and done["plan"]["accelerator"] == "cpu"


def test_a_server_elsewhere_whose_key_the_job_would_not_have_is_refused_before_it(
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    external = "evaluation: {external: {base_url: 'http://host:1/v1', key_variable: A_KEY}}"
    teacher = (
        "algorithm: {type: opd}\nteacher: {base_url: 'http://h/v1', model: {name: t}, key_variable: A_KEY}"
    )
    for kind, words in (("eval", external), ("rl", teacher)):
        environments = "eval" if kind == "eval" else "train"
        recipe = folder / f"{kind}.yaml"
        recipe.write_text(
            f"kind: {kind}\nname: elsewhere\nmodel: {{name: some/model}}\nmax_steps: 1\n{words}\n"
            f"environments: {{{environments}: [{{id: reverse-text}}]}}\n"
        )
        prepare = ("submit", str(recipe), "-p", "h100x64", "--dry-run", "--run-dir", str(folder / kind))
        done = primerl(*prepare)
        assert "A_KEY" in str(done.exception), done.output
        assert not (folder / kind).exists()
        setup = primerl(*prepare, "--profile-set", "software.setup=[source keys.sh]")
        assert setup.exit_code == 0, setup.output  # it may be there when the job runs


def test_servers_elsewhere_get_only_what_was_asked_for():
    sent = external_sampling_config(Sampling(temperature=0.5, max_tokens=7)).model_dump(exclude_none=True)
    assert sent.get("temperature") == 0.5 and not {"top_k", "min_p", "top_p", "cache_salt"} & sent.keys()
    assert external_sampling_config(Sampling(top_p=0.9)).model_dump(exclude_none=True)["top_p"] == 0.9


# -- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, code, said",
    [
        (
            ("run", "--steps", "15"),
            ExitCode.NOT_FOUND,
            "has no weights of step 15; there are those of 10, 20",
        ),
        (("run", "--weights-dir", "model"), ExitCode.NOT_FOUND, "model has no complete policy version"),
        (("run", "--weights-dir", "x", "--watch"), ExitCode.NOT_FOUND, "is no run directory"),
        (("run", "--steps", "ten"), ExitCode.USAGE, "'ten' is neither all nor a list"),
        (("nothing",), ExitCode.NOT_FOUND, "'nothing' is neither a recipe nor a run"),
        (("run", "--base-url", "http://h/v1"), ExitCode.CONFIG, "--base-url needs --model"),
        (("run", "--base-url", "h", "--model", "m"), ExitCode.CONFIG, "evaluation.external.base_url"),
        (("run", "--base-url", "http://h/v1", "--model", "m"), ExitCode.CONFIG, "OPENAI_API_KEY"),
        (("run", "--key-variable", "K"), ExitCode.CONFIG, "--base-url, which is missing"),
        (("recipe.yaml", "-p", "local", "--no-eval-base"), ExitCode.CONFIG, "there is nothing to evaluate"),
        (("recipe.yaml",), ExitCode.USAGE, "needs --profile"),
        (("run", "--set", "environments.eval=[]"), ExitCode.CONFIG, "needs at least one environment"),
    ],
)
def test_bad_requests_are_one_sentence_and_leave_nothing(
    trained: RunDir, monkeypatch: pytest.MonkeyPatch, words, code, said
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    before = tree(trained.root.parent)
    done = primerl("eval", *words)
    if code == ExitCode.USAGE:
        assert done.exit_code == code and said in done.output
    else:
        assert isinstance(done.exception, PrimerlError) and done.exception.exit_code == code
        assert said in str(done.exception)
    assert tree(trained.root.parent) == before


def test_engines_are_told_of_the_adapters_that_they_find_but_not_of_too_large_ones(trained: RunDir) -> None:
    config = trained.weights_step(20) / "adapter_config.json"
    write_json(config, {"r": 24, "lora_alpha": 6.0})
    recipe = prepare().phase(MAIN_PHASE).recipe
    assert recipe.lora is not None and (recipe.lora.rank, recipe.lora.alpha) == (24, 6.0)
    assert recipe.policy_name == recipe.name != recipe.model.name
    assert prepare("--model", "model", run_dir="other").phase(MAIN_PHASE).recipe.lora is None
    write_json(config, {"r": 1024, "lora_alpha": 6.0})
    done = primerl("eval", "run", "--run-dir", "third")
    assert isinstance(done.exception, ConfigError) and "rank 1024" in str(done.exception)


def test_the_base_model_of_adapters_is_an_adapter_of_zeros(tmp_path: Path) -> None:
    like = tmp_path / "step_3"
    like.mkdir()
    save_file(
        {"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float16)}, like / "adapter_model.safetensors"
    )
    write_json(like / "adapter_config.json", {"r": 2})
    run = RunDir(tmp_path / "scored")
    blank = write_blank_adapter(run, like)
    assert run.stable_weights() == [0] and not manifest_fault(blank)
    tensors = load_file(blank / "adapter_model.safetensors")
    assert {name: (value.shape, value.dtype, value.any()) for name, value in tensors.items()} == {
        "a": ((2, 3), np.float32, False),
        "b": ((4,), np.float16, False),
    }
    assert read_json(blank / "adapter_config.json") == {"r": 2}


def test_a_directory_of_other_scores_is_not_mixed_with_these(trained: RunDir) -> None:
    earlier = prepare()
    run = RunDir(Path(earlier.run_dir))
    check_same(run, earlier, prepare("--steps", "10"))
    with pytest.raises(OccupiedError, match="environment held-out"):
        check_same(run, earlier, prepare("--samples", "7", run_dir="other"))
    with pytest.raises(OccupiedError, match="another sampling"):
        check_same(run, earlier, prepare("--set", "rollouts.sampling.top_p=0.5", run_dir="third"))
    done = primerl("eval", "run", "--run-dir", "run")
    assert isinstance(done.exception, OccupiedError) and "holds a run of kind sft" in str(done.exception)


def test_an_evaluation_is_not_evaluated(trained: RunDir) -> None:
    prepare()
    done = primerl("eval", "scored")
    assert isinstance(done.exception, ConfigError) and "is an evaluation itself" in str(done.exception)


def test_a_recipe_with_filters_and_a_tracker_gives_an_evaluation_without_them(tmp_path: Path) -> None:
    text = "kind: rl\nname: a\nmodel: {name: m/m}\nmax_steps: 1\ntracking: {wandb: {project: p}}\n"
    text += "environments: {train: [{id: reverse-text}]}\nalgorithm: {type: opo}\nloss: {type: gspo}\n"
    (tmp_path / "r.yaml").write_text(text + "rollouts: {filters: [{type: repetition}]}\n")
    recipe = load_evaluation(tmp_path / "r.yaml", EvalRequest(environments=("reverse-text",)), []).recipe
    assert recipe.tracking.wandb is None and recipe.rollouts.filters == () and recipe.kind == "eval"
    with pytest.raises(ConfigError, match=r"unknown key 'evaluation\.stepz'"):
        load_evaluation(tmp_path / "r.yaml", EvalRequest(), ["evaluation.stepz=1"])


# -- what is missing -----------------------------------------------------------------------------------------------------


def test_only_pairs_without_a_score_are_missing(trained: RunDir) -> None:
    plan = prepare()
    run = RunDir(Path(plan.run_dir))
    assert missing_scores(run, plan) == [(0, "held-out"), (10, "held-out"), (20, "held-out")]
    score(run, 0)
    score(run, 20)
    assert missing_scores(run, plan) == [(10, "held-out")]
    score(run, 10)
    done = primerl("eval", "run", "--run-dir", "scored")
    assert done.exit_code == 0 and "nothing is missing" in done.output and not run.job.exists()
    assert missing_scores(run, prepare("--watch")) == "to come"


def test_rollouts_of_unfinished_pairs_are_dropped_and_run_again(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    for version, label in ((0, "a"), (0, "b"), (10, "a")):
        append_json(path, {"env": label, "version": version, "reward": 1.0})
    keep_rows(path, lambda row: (row["version"], row["env"]) in {(0, "a"), (10, "a")})
    assert [(row["version"], row["env"]) for row in read_jsonl(path)] == [(0, "a"), (10, "a")]


class Due:
    """An evaluator to which some versions are done."""

    def __init__(self) -> None:
        self.done: set[int] = set()

    def due(self, version: int) -> list[int]:
        return [] if version in self.done else [0]


def test_a_live_run_is_watched_to_its_last_version_and_deleted_ones_are_passed_over(tmp_path: Path) -> None:
    live, run, due = RunDir(tmp_path / "live"), RunDir(tmp_path / "scored"), Due()
    live.control.mkdir(parents=True)
    write_json(live.state, {"state": RunState.RUNNING, "attempt": 1})
    owner = {"host": os.uname().nodename, "pid": os.getpid(), "started": process_start_time(os.getpid())}
    write_json(live.supervisor_lock, owner)
    assert not is_run_over(live)

    def publish(step: int) -> None:
        add_weights(live.weights, step)
        write_json(live.weights_step(step) / "manifest.json", {"files": []})

    settings = Evaluation(weights=str(live.weights), watch=True, every=10, base=False)
    versions = Versions(run, settings)

    async def watch() -> list[int]:
        seen = []
        waiting = asyncio.create_task(versions.next(due))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        publish(5)
        publish(10)
        while (version := await waiting) is not None:
            seen.append(version)
            due.done.add(version)
            if version == 10:
                (live.weights / ".leases" / f"step_10.{versions.holder}").unlink()
                publish(13)
                write_json(live.state, {"state": RunState.DONE, "attempt": 1})
            waiting = asyncio.create_task(versions.next(due))  # type: ignore[arg-type]
        return seen

    assert asyncio.run(watch()) == [10, 13]
    write_json(live.job, {"attempt": 2})
    assert not is_run_over(live), "its next attempt waits in the queue"


def test_a_step_that_is_gone_when_the_job_starts_is_named(tmp_path: Path) -> None:
    add_weights(tmp_path / "weights", 10)
    with pytest.raises(NotFoundError, match="no weights of step 20"):
        Versions(RunDir(tmp_path / "run"), Evaluation(weights=str(tmp_path / "weights"), steps=(10, 20)))


# -- how it looks --------------------------------------------------------------------------------------------------------


def test_scores_fit_80_columns_and_are_drawn(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "scored")
    for step in (0, 10, 123456):
        score(run, step, "a-rather-long-name-of-an-environment", **{"completion_tokens/mean": 4096.0})
        score(run, step, "b", errors=12)
    text = score_text(run)
    assert max(map(len, text.splitlines())) <= 80
    assert (
        text.count("a-rather-long-nam…") == 3
        and "base" in text
        and "a-rather-long-name-of-an-environment, avg@2" in text
    )
    figure = write_figure(run, tmp_path / "scores.svg").read_text()
    assert figure.startswith("<svg xmlns=") and figure.count("<polyline") == 2


def test_status_of_an_evaluation_shows_its_scores_so_far(trained: RunDir) -> None:
    run = RunDir(Path(prepare().run_dir))
    assert "no scores yet" in primerl("status", "scored").output
    score(run, 10)
    assert re.search(r"held-out +10 +2 +0.500", primerl("status", "scored").output)


def test_evaluations_during_training_are_shown_the_same_way(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    append_json(
        run.metrics("eval"),
        {
            "step": 20,
            "time": 1.0,
            "eval/held-out/avg@2": 0.5,
            "eval/held-out/tasks": 4,
            "eval/policy_version/max": 20,
        },
    )
    assert read_scores(run)[20, "held-out"]["avg@2"] == 0.5 and len(read_scores(run)) == 1
    run.plan.write_text("{}")
    done = primerl("scores", str(run.root), "--json")
    assert json.loads(done.output)["scores"][0]["step"] == 20
