"""Evaluations as runs: requests, refusals before anything starts, missing scores, and the display of scores."""

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
from primerl_hpc.common.names import MAIN_PHASE, RunState
from primerl_hpc.launch.evaluate import EvalRequest, check_same, is_complete, load_evaluation, missing_scores
from primerl_hpc.launch.submit import prepare_run
from primerl_hpc.observe.report.scores import write_figure
from primerl_hpc.observe.table import score_text
from primerl_hpc.orchestrator.eval_loop import (
    ScoredEvaluator,
    Versions,
    is_run_over,
    prune_evaluated,
    raise_when_stopped,
)
from primerl_hpc.orchestrator.event_loop import StoppedOnRequest
from primerl_hpc.orchestrator.rollouts.env_client import external_sampling_config
from primerl_hpc.orchestrator.rollouts.traces import keep_rows
from primerl_hpc.plan.plan import Plan, load_plan
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.recipe.schema.evaluation import EvaluationSettings
from primerl_hpc.recipe.schema.rollout import Sampling
from primerl_hpc.run.lock import process_start_time
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.scores import drop_scores_after, read_scores, write_score
from primerl_hpc.run.step_dirs import STABLE
from primerl_hpc.runtime.step_history import is_phase_done
from primerl_hpc.transport.weights.filesystem import WeightWriter, manifest_fault, write_blank_adapter
from tests.support.hub import cache_dataset, cache_model
from tests.support.sbatch import read_directives
from tests.unit.cli.test_cli import folder, tree  # noqa: F401

EVAL = "environments: {eval: [{id: reverse-text, name: held-out, samples: 2}]}\nrollouts: {sampling: {max_tokens: 12}}\n"  # noqa: E501


def primerl(*words: str) -> Result:
    """Run ``primerl-hpc …`` in this process: dozens of interpreters would take minutes."""
    return CliRunner().invoke(cli, list(words))


def add_weights(weights: Path, *steps: int) -> None:
    for step in steps:
        (weights / f"step_{step}").mkdir(parents=True)
        (weights / f"step_{step}" / STABLE).touch()


@pytest.fixture
def trained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:  # noqa: F811
    """An SFT run with the kept versions 10 and 20; its folder is the working directory."""
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


# -- what is asked ---------------------------------------------------------------------------------


def test_versions_are_the_base_the_requested_ones_or_every_nth_and_the_last():
    there = [10, 20, 25, 30, 37]
    assert EvaluationSettings(weights="w").versions(there) == [0, *there]
    assert EvaluationSettings(weights="w", steps=(30, 10), base=False).versions(there) == [10, 30]
    assert EvaluationSettings(weights="w", every=20).versions(there) == [0, 20, 37]
    assert EvaluationSettings(weights="w", every=20).versions(there, is_over=False) == [0, 20]
    assert EvaluationSettings().versions([]) == [0]


def test_a_dry_run_shows_the_folder_of_the_results_and_writes_nothing(trained: RunDir) -> None:
    before = tree(trained.root.parent)
    plan = json.loads(primerl("eval", "run", "--dry-run", "--json").output)["plan"]
    assert plan["run_dir"] == str(trained.evaluation.root) and tree(trained.root.parent) == before
    prepare("--samples", "8", run_dir=str(trained.evaluation.root))
    score(trained.evaluation, 10)
    refused = primerl("eval", "run", "--dry-run").exception  # as it would be without --dry-run
    assert isinstance(refused, OccupiedError) and "held-out" in str(refused)


def test_a_runs_model_weights_and_environments_are_taken_from_its_plan(trained: RunDir) -> None:
    plan = prepare("--steps", "20", "--env", "held-out,alphabet-sort", "--samples", "4", "--replicas", "2")
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


def test_an_environment_named_twice_is_evaluated_once(trained: RunDir) -> None:
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
def test_an_environment_without_a_unique_name_is_refused(
    trained: RunDir, names: list[str], says: str
) -> None:
    done = primerl("eval", "run", "--dry-run", *(word for name in names for word in ("--env", name)))
    assert isinstance(done.exception, ConfigError) and f"--env: {says}" in str(done.exception)


def test_a_plan_of_another_version_or_with_changes_is_refused(trained: RunDir) -> None:
    plan = read_json(trained.plan)
    for changed in (plan | {"surprise": 1}, plan | {"version": 0}, [plan]):
        write_json(trained.plan, changed)
        with pytest.raises(
            DataError, match=r"another version of primerl-hpc|plan version (0|None) is not supported"
        ):
            load_plan(trained)


@pytest.mark.parametrize(
    "words", [("eval", "run", "--steps", "²"), ("status", "--watch", "--interval", "-1")], ids=" ".join
)
def test_invalid_numbers_are_a_usage_error(trained: RunDir, words: tuple[str, ...]) -> None:
    assert primerl(*words).exit_code == ExitCode.USAGE


def test_an_external_model_needs_no_engines_and_no_model_folder(trained: RunDir, monkeypatch) -> None:
    monkeypatch.setenv("A_KEY", "hunter2x")
    url = ("--base-url", "http://host:1/v1", "--model", "big", "--key-variable", "A_KEY")
    plan = prepare(*url, run_dir="elsewhere")
    (phase,) = plan.phases
    assert [process.role.value for process in phase.processes] == ["env_server", "evaluator"]
    assert phase.model_path == "big"
    root = trained.root.parent / "elsewhere"  # the copy of the code has the word in an example
    everything = [path for path in root.rglob("*") if path.is_file() and root / "code" not in path.parents]
    assert everything and not any("hunter2x" in path.read_text() for path in everything)


def test_a_job_without_engines_requests_no_gpus_and_uses_the_cpu_partition(
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


def test_a_recipe_with_an_external_model_is_submitted_without_gpus(
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


def test_an_external_server_whose_key_is_not_set_is_refused_before_the_job(
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
            f"kind: {kind}\nname: elsewhere\nmodel: {{name: some/model, renderer: {{name: chatml}}}}\n"
            f"max_steps: 1\n{words}\n"
            f"environments: {{{environments}: [{{id: reverse-text}}]}}\n"
        )
        prepare = ("submit", str(recipe), "-p", "h100x64", "--dry-run", "--run-dir", str(folder / kind))
        done = primerl(*prepare)
        assert "A_KEY" in str(done.exception), done.output
        assert not (folder / kind).exists()
        setup = primerl(*prepare, "--profile-set", "software.setup=[source keys.sh]")
        assert setup.exit_code == 0, setup.output  # it may be there when the job runs


def test_external_servers_get_only_the_requested_parameters():
    sent = external_sampling_config(Sampling(temperature=0.5, max_tokens=7)).model_dump(exclude_none=True)
    assert sent.get("temperature") == 0.5 and not {"top_k", "min_p", "top_p", "cache_salt"} & sent.keys()
    assert external_sampling_config(Sampling(top_p=0.9)).model_dump(exclude_none=True)["top_p"] == 0.9
    unbounded = external_sampling_config(Sampling(max_tokens=None))
    assert "max_tokens" not in unbounded.model_dump(exclude_none=True)  # the server's own default


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, code, said",
    [
        (("run", "--steps", "15"), ExitCode.NOT_FOUND, "has no weights of step 15; it has steps 10, 20"),
        (("run", "--weights-dir", "model"), ExitCode.NOT_FOUND, "model has no complete policy version"),
        (("run", "--weights-dir", "x", "--watch"), ExitCode.NOT_FOUND, "is not a run directory"),
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
def test_invalid_requests_are_one_sentence_and_leave_no_files(
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


def test_trained_adapters_configure_the_engines_and_unsupported_ones_are_refused(trained: RunDir) -> None:
    config = trained.weights_step(20) / "adapter_config.json"
    write_json(config, {"r": 24, "lora_alpha": 6.0})
    recipe = prepare().phase(MAIN_PHASE).recipe
    assert recipe.lora is not None and (recipe.lora.rank, recipe.lora.alpha) == (24, 6.0)
    assert recipe.policy_name == recipe.name != recipe.model.name
    assert prepare("--model", "model", run_dir="other").phase(MAIN_PHASE).recipe.lora is None
    write_json(config, {"r": 1024, "lora_alpha": 6.0})
    done = primerl("eval", "run", "--run-dir", "third")
    assert isinstance(done.exception, ConfigError) and "rank 1024" in str(done.exception)
    write_json(config, {"r": 8, "lora_alpha": 6.0, "target_modules": ["o_proj", "kv_b_proj"]})
    done = primerl("eval", "run", "--run-dir", "third")
    assert isinstance(done.exception, ConfigError) and "kv_b_proj, which vLLM ignores" in str(done.exception)


def test_version_0_of_adapters_is_an_adapter_of_zeros(tmp_path: Path) -> None:
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


def test_a_directory_with_scores_that_are_not_comparable_is_refused(trained: RunDir) -> None:
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


def test_an_evaluation_drops_the_filters_and_the_tracker_of_its_recipe(tmp_path: Path) -> None:
    text = "kind: rl\nname: a\nmodel: {name: m/m}\nmax_steps: 1\ntracking: {wandb: {project: p}}\n"
    text += "environments: {train: [{id: reverse-text}]}\nalgorithm: {type: opo}\nloss: {type: gspo}\n"
    (tmp_path / "r.yaml").write_text(text + "rollouts: {filters: [{type: repetition}]}\n")
    recipe = load_evaluation(tmp_path / "r.yaml", EvalRequest(environments=("reverse-text",)), []).recipe
    assert recipe.tracking.wandb is None and recipe.rollouts.filters == () and recipe.kind == "eval"
    with pytest.raises(ConfigError, match=r"unknown key 'evaluation\.stepz'"):
        load_evaluation(tmp_path / "r.yaml", EvalRequest(), ["evaluation.stepz=1"])


# -- what is missing -------------------------------------------------------------------------------


def test_only_pairs_without_a_score_are_missing(trained: RunDir) -> None:
    plan = prepare()
    run = RunDir(Path(plan.run_dir))
    assert missing_scores(run, plan) == [(0, "held-out"), (10, "held-out"), (20, "held-out")]
    score(run, 0)
    score(run, 20)
    assert missing_scores(run, plan) == [(10, "held-out")]
    score(run, 10)
    done = primerl("eval", "run", "--run-dir", "scored")
    assert done.exit_code == 0 and "the evaluation is complete" in done.output and not run.job.exists()
    assert is_complete(run, plan) and not is_complete(run, prepare("--watch"))  # a watched run may write more


def test_a_finished_evaluation_stays_unchanged_when_another_environment_is_requested(trained: RunDir) -> None:
    finished = trained.evaluation
    prepare(run_dir=str(finished.root))
    for step in (0, 10):
        score(finished, step)

    def asked(*names: str) -> tuple[str, list[str]]:
        words = [word for name in names for word in ("--env", name)]
        done = primerl("eval", "run", "--dry-run", "--json", *words)
        assert done.exception is None, done.exception
        plan = json.loads(done.stdout)["plan"]
        return plan["run_dir"], [each["id"] for each in plan["phases"][0]["recipe"]["environments"]["eval"]]

    # unfinished: the missing pair and the other environment are run together
    assert asked("alphabet-sort") == (str(finished.root), ["alphabet-sort"])
    score(finished, 20)
    before = tree(finished.root)
    assert asked("held-out", "alphabet-sort") == (f"{finished.root}-alphabet-sort", ["alphabet-sort"])
    assert asked("held-out")[0] == str(finished.root)
    done = primerl("eval", "run", "--env", "no/such-environment", "-p", "nowhere")
    assert done.exit_code != 0 and tree(finished.root) == before
    assert "the evaluation is complete" in primerl("eval", "run").output


def test_rollouts_of_unfinished_pairs_are_dropped_and_run_again(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    for version, label in ((0, "a"), (0, "b"), (10, "a")):
        append_json(path, {"env": label, "version": version, "reward": 1.0})
    keep_rows(path, lambda row: (row["version"], row["env"]) in {(0, "a"), (10, "a")})
    assert [(row["version"], row["env"]) for row in read_jsonl(path)] == [(0, "a"), (10, "a")]


class Due:
    """An evaluator with some evaluated versions."""

    def __init__(self) -> None:
        self.done: set[int] = set()

    def due(self, version: int) -> list[int]:
        return [] if version in self.done else [0]


def test_a_live_run_is_watched_to_its_last_version_and_deleted_ones_are_skipped(tmp_path: Path) -> None:
    live, run, due = RunDir(tmp_path / "live"), RunDir(tmp_path / "scored"), Due()
    live.control.mkdir(parents=True)
    write_json(live.state, {"state": RunState.RUNNING, "attempt": 1})
    owner = {"host": os.uname().nodename, "pid": os.getpid(), "started": process_start_time(os.getpid())}
    write_json(live.supervisor_lock, owner)
    assert not is_run_over(live)

    def publish(step: int) -> None:
        add_weights(live.weights, step)
        write_json(live.weights_step(step) / "manifest.json", {"files": []})

    settings = EvaluationSettings(weights=str(live.weights), watch=True, every=10, base=False)
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


def test_a_step_that_was_deleted_before_the_job_started_is_named(tmp_path: Path) -> None:
    add_weights(tmp_path / "weights", 10)
    with pytest.raises(NotFoundError, match="the weights of step 20 do not exist"):
        Versions(
            RunDir(tmp_path / "run"), EvaluationSettings(weights=str(tmp_path / "weights"), steps=(10, 20))
        )


# -- how it looks ----------------------------------------------------------------------------------


def test_scores_fit_80_columns_and_are_drawn(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "scored")
    for step in (0, 10, 123456):
        score(run, step, "a-rather-long-name-of-an-environment", **{"completion_tokens/mean": 16384.5})
        score(run, step, "b", errors=12)
    text = score_text(run)
    assert max(map(len, text.splitlines())) <= 80
    assert (
        text.count("a-rather-long-na…") == text.count("16384.5") == 3
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


# -- of a run of kind sft, while it trains
# ---------------------------------------------------------------------------------

ONLINE = (
    "kind: sft\nname: online\nmodel: {{name: org/model, renderer: {{name: chatml}}}}\n"
    "max_steps: 50\nsft: {{data: {{path: org/rows}}}}\n"
    "environments: {{train: [{{id: reverse-text}}], eval: [{{id: reverse-text, name: held-out, samples: 2}}]}}\n"
    "rollouts: {{sampling: {{max_tokens: 12}}}}\nweights: {{interval: 20}}\nevaluation: {evaluation}\n"
)


def online_recipe(folder: Path, evaluation: str = "{every: 10}", **more: str):  # noqa: F811
    recipe = folder / "online.yaml"
    cache_model(folder / "hub", "org/model")
    cache_dataset(folder / "datasets", "org/rows")
    caches = f"env: {{HF_HUB_CACHE: {folder}/hub, HF_DATASETS_CACHE: {folder}/datasets}}\n"
    text = ONLINE.format(evaluation=evaluation) + caches
    recipe.write_text(text + "".join(f"{key}: {value}\n" for key, value in more.items()))
    return load_recipe(str(recipe))


def test_an_sft_run_with_an_evaluation_has_engines_and_an_evaluator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for profile, trainer_nodes in (("local", (0,)), ("h100x64", (7,))):
        _, plan = prepare_run(online_recipe(tmp_path), load_profile(profile), Path(profile))
        (phase,) = plan.phases
        roles = [process.role.value for process in phase.processes]
        assert roles[-4:] == ["router", "env_server", "evaluator", "sft"] and set(roles[:-4]) == {"inference"}
        assert phase.process("env_server-1").log == "envs/eval/held-out.log"  # none for training
        assert phase.process("sft-0").nodes == trainer_nodes
        taken = [
            (node, slot) for each in phase.processes for node in each.nodes for slot in each.accelerators
        ]
        assert len(taken) == len(set(taken))
        assert load_plan(RunDir(Path(profile).resolve())) == plan
    _, plan = prepare_run(online_recipe(tmp_path, "null"), load_profile("local"), Path("alone"))
    assert [process.name for process in plan.phases[0].processes] == ["sft-0"]


@pytest.mark.parametrize(
    ("evaluation", "more", "said"),
    [
        ("{}", {}, "evaluation needs every"),
        ("{every: 10, watch: true}", {}, "evaluation.watch belongs to kind eval"),
        ("{every: 10, weights: x}", {}, "evaluation.weights belongs to kind eval"),
        ("{every: 10, external: {base_url: 'http://h/v1'}}", {}, "evaluation.external belongs to kind eval"),
        ("{steps: [10, 60]}", {}, "evaluation.steps 60 is greater than max_steps 50"),
        ("{every: 10}", {"seq_len": "12"}, "leaves no room for a prompt"),
        ("{every: 10}", {"lora": "{target_modules: [kv_b_proj]}"}, "ignores its adapters"),
    ],
)
def test_an_evaluation_that_an_sft_run_cannot_do_is_refused(
    tmp_path: Path, evaluation: str, more: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        online_recipe(tmp_path, evaluation, **more)


def test_an_evaluation_of_an_sft_run_needs_environments(tmp_path: Path) -> None:
    recipe = tmp_path / "none.yaml"
    recipe.write_text(re.sub(r"environments: .*\n", "", ONLINE.format(evaluation="{every: 10}")))
    with pytest.raises(ConfigError, match=r"evaluation needs environments\.eval"):
        load_recipe(str(recipe))


def test_an_sft_run_is_done_when_its_last_version_has_its_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run, plan = prepare_run(
        online_recipe(tmp_path, "{every: 20}", checkpoint="{at_end: false}"),
        load_profile("local"),
        Path("run"),
    )
    (phase,) = plan.phases
    for version in (20, 40, 50):
        writer = WeightWriter(run, version)
        writer.begin()
        writer.commit([])
    versions = Versions(run, phase.recipe.evaluation.while_training(str(run.weights)), last_step=50)

    def next_version() -> int | None:
        return asyncio.run(versions.next(ScoredEvaluator(run, phase.recipe.environments, [4])))

    for version in (0, 20, 40, 50):
        assert not is_phase_done(run, phase)
        assert next_version() == version
        score(run, version)
    assert is_phase_done(run, phase) and next_version() is None
    drop_scores_after(run, 40)  # the trainer continued from an earlier checkpoint
    assert [step for step, _ in read_scores(run)] == [0, 20, 40] and not is_phase_done(run, phase)


def test_evaluated_versions_are_deleted_except_kept_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest two, multiples of weights.interval, and versions without scores are kept."""
    monkeypatch.chdir(tmp_path)
    run, plan = prepare_run(online_recipe(tmp_path), load_profile("local"), Path("run"))
    recipe = plan.phases[0].recipe
    add_weights(run.weights, 10, 20, 30, 40, 50)

    def prune() -> None:
        prune_evaluated(run, recipe, ScoredEvaluator(run, recipe.environments, [4]))

    for version in (10, 20):
        score(run, version)
    prune()
    assert run.stable_weights() == [20, 30, 40, 50]
    for version in (30, 40, 50):
        score(run, version)
    prune()
    assert run.stable_weights() == [20, 40, 50]


def test_the_evaluator_of_an_sft_run_stops_on_request(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.stop_request.parent.mkdir()
    write_json(run.stop_request, {"reason": "cancel"})
    with pytest.raises(StoppedOnRequest) as stopped:
        asyncio.run(raise_when_stopped(run))
    assert stopped.value.exit_code == ExitCode.STOPPED
