"""Secrets are rejected where they would be copied, passed by name instead, and hidden from what a model drives."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.cli.diagnose import command as diagnose_command
from primerl_hpc.cli.report import command as report_command
from primerl_hpc.cli.submit import command as submit_command
from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.document import load_yaml
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.files import append_json, write_json, write_text
from primerl_hpc.common.names import Role, process_name
from primerl_hpc.common.passed import PassedVariables
from primerl_hpc.common.safety.secret_values import MASK, has_secret_form, is_secret, mask, mask_data
from primerl_hpc.launch.queue import environ_here, start_here, submit_script
from primerl_hpc.launch.submit import prepare_run
from primerl_hpc.plan.plan import OnExit, load_plan
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.recipe.resolve import resolve
from primerl_hpc.run.metrics import MetricsWriter
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.step import Launch
from primerl_hpc.tracking.relay import Relay
from tests.support.helpers import (
    PATIENCE_S,
    ROOT,
    captured,
    make_plan,
    make_tiny_model,
    process_plan,
    start_role,
    unusable_sft_recipe,
    wait_for,
)
from tests.support.prime_server import KEY, serve_prime
from tests.support.stranger import NOBODY
from tests.support.wandb_server import API_KEY, serve_wandb

TINY = str(ROOT / "recipes" / "reverse_text" / "tiny.yaml")
TOKEN = "hf_" + "AbCdEfGhIj" * 4
LETTERS = "Ab1Cd2Ef3Gh4Ij5Kl6Mn7Op8Qr9St0Uv1Wx2Yz3Ab4"
HEX = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "x"),
        ("WANDB_API_KEY", "x"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("SLURM_JWT", "x"),
        ("DB_PASSWORD", "x"),
        ("openai_api_key", "x"),
        ("X", TOKEN),
        ("X", "sk-" + "a" * 40),
        ("X", "AKIAIOSFODNN7EXAMPLE"),
        ("X", "https://me:hunter2@index.example.org/simple"),
        ("X", "-----BEGIN RSA PRIVATE KEY-----"),
        *[(name, "hunter2x") for name in ("DB_PASS", "PGPASS", "MYPW", "MYSQL_PWD", "GITHUBTOKEN", "apiKey")],
        ("DB_PASSWORD", "123456"),
        ("OPTS", "--token=hunter2x"),
        ("OPTS", "--verbose --api-key hunter2x"),
        ("CURL", "-H 'Authorization: Bearer hunter2x'"),
        ("INDEX", "https://index.example.org/?access_token=hunter2x&page=1"),
        ("X", "wandb_v1_" + LETTERS),
        ("X", "pit_" + LETTERS),
        ("X", "nvapi-" + LETTERS),
        ("X", "AIza" + LETTERS[:35]),
        ("X", "ya29." + LETTERS),
        ("X", "r8_" + LETTERS[:37]),
        ("X", "sk_live_" + LETTERS[:24]),
        ("X", "dapi" + HEX[:32]),
        ("X", "dckr_pat_" + LETTERS[:27]),
        ("X", HEX),
    ],
)
def test_a_secret_is_detected_by_its_name_or_its_form(name: str, value: str) -> None:
    assert is_secret(name, value)
    for where in ("env", "env_by_role.trainer"):
        with pytest.raises(ConfigError, match=rf"{name}: {{from: {name}}}"):
            load_recipe(TINY, overrides=[f"{where}.{name}={value}"], environ={})
    with pytest.raises(ConfigError, match="looks like a secret"):
        load_profile("local", overrides=[f"env.{name}={value}"], environ={})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("MAX_TOKENS", "12"),
        ("NCCL_DEBUG", "INFO"),
        ("HF_TOKEN_PATH", "/home/me/.cache/huggingface/token"),
        ("KEYBOARD", "x"),
        ("HTTPS_PROXY", "http://proxy.example.org:3128"),
        ("MODEL_REVISION", HEX),
        ("GIT_SHA", HEX),
        ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1"),
        ("MAX_TOKEN_BUDGET", "8192"),
        ("PAD_TOKEN", "<|endoftext|>"),
        ("OPTS", "--max-tokens=12 --token=$HF_TOKEN --token-file=/home/me/token"),
        ("BYPASS", "x"),
        ("SSH_ASKPASS", "/usr/bin/ask"),
        ("OLDPWD", "/home/me"),
        ("PUBLIC_KEY", "x"),
        ("MY_KEY_FILE", "/home/me/key"),
        ("CC", "gcc -march=native"),
    ],
)
def test_values_that_are_not_secrets_are_accepted(name: str, value: str) -> None:
    assert not is_secret(name, value)
    assert load_recipe(TINY, overrides=[f"env.{name}={value}"], environ={}).recipe.env[name] == value
    assert mask_data({name: value}) == {name: value}


@given(st.text(max_size=200))
def test_masking_removes_secrets_from_arbitrary_text(text: str) -> None:
    assert TOKEN not in mask(f"{text} {TOKEN} {text}")
    assert mask(f"HF_TOKEN={TOKEN}") == f"HF_TOKEN={MASK}"
    assert mask("env.WANDB_API_KEY=abc") == f"env.WANDB_API_KEY={MASK}"


OTHER_PLACES = (
    f"environments.train.0.args={{hub: '{TOKEN}'}}",
    "environments.train.0.args={api_key: hunter2x}",
    f"tracking={{wandb: {{project: '{TOKEN}'}}}}",
)


@pytest.mark.parametrize("override", OTHER_PLACES)
def test_a_secret_outside_of_variables_is_refused_with_its_place_and_without_its_value(override: str) -> None:
    with pytest.raises(ConfigError, match="looks like a secret") as caught:
        load_recipe(TINY, overrides=[override], environ={})
    assert caught.value.location == "--set" and "hunter2x" not in str(caught.value)


@pytest.mark.parametrize("line", ["export MYPW=hunter2x", "login --password hunter2x", f"echo {TOKEN}"])
def test_a_secret_in_a_shell_line_of_a_profile_is_refused(line: str) -> None:
    with pytest.raises(ConfigError, match="secret"):
        load_profile("local", overrides=[f"software.setup=[{json.dumps(line)}]"], environ={})
    load_profile("local", overrides=['software.setup=["export MYPW=$(cat ~/pw)"]'], environ={})


SHIPPED = sorted(
    path for folder in ("recipes", "cluster_profiles") for path in (ROOT / folder).rglob("*.yaml")
)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_nothing_in_a_shipped_recipe_or_profile_is_taken_for_a_secret(path: Path) -> None:
    text = path.read_text()
    assert mask(text) == text
    values = load_yaml(path).values
    assert json.dumps(mask_data(values)) == json.dumps(values)


PRIME_RL = (
    ("eval.client.api_key_var", "PRIME_API_KEY"),
    ("eval.client.base_url", "https://api.pinference.ai/api/v1"),
    ("orchestrator.algo.demo_key", "demonstration"),
    ("orchestrator.algo.length_penalty.num_input_tokens_weight", 0.1),
    ("orchestrator.train.sampling.max_completion_tokens", 768),
    ("trainer.model.fused_lm_head_token_chunk_size", 8192),
    ("trainer.enable_token_export", True),
    ("tokenizer.name", "Qwen/Qwen3-4B-Instruct-2507"),
    ("inference.deployment.decode_vllm_overrides.max_num_batched_tokens", 32768),
    ("sft.messages_key", "messages"),
    ("env.args.answer_key", "answer"),
    ("env.args.dataset_revision", HEX),
)
"""Keys of prime-rl's configurations whose names resemble those of secrets."""


def test_keys_about_tokens_and_columns_are_not_taken_for_secrets() -> None:
    assert mask_data(dict(PRIME_RL)) == dict(PRIME_RL)
    for name, value in PRIME_RL:
        key = name.rpartition(".")[2]
        assert mask(f"{key} = {value}") == f"{key} = {value}"


PROSE = (
    "the largest mismatch of a token: a few large values",
    "43 pass: nine families train",
    "rollouts without a sampled token: often a prompt",
    f"git checkout {HEX} && pip install x@{HEX}",
    "data:image/png;base64,/EAAC" + LETTERS * 8,
)


@pytest.mark.parametrize("text", PROSE)
def test_sentences_commits_and_images_are_left_as_they_are(text: str) -> None:
    assert mask(text) == text and not has_secret_form(text)


def test_the_words_of_a_command_and_nested_data_are_masked_by_name() -> None:
    command = "primerl-hpc submit --set env.MYPW=hunter2x --token hunter2x --max-tokens 8".split()
    masked = ["primerl-hpc", "submit", "--set", f"env.MYPW={MASK}", "--token", MASK, "--max-tokens", "8"]
    assert mask_data(command) == masked
    assert mask("OPTS=--verbose=1,--token=hunter2x") == f"OPTS=--verbose=1,--token={MASK}"
    nested = {"args": [{"db_pass": "hunter2x", "rows": 5}], "env": {"HF_TOKEN": {"from": "HF_TOKEN"}}}
    assert mask_data(nested) == {"args": [{"db_pass": MASK, "rows": 5}], "env": nested["env"]}


def leaking_run(folder: Path, tracking: dict[str, Any]) -> RunDir:
    """A run whose recipe, rollouts, log and event contain a secret by form (`TOKEN`) and one by name."""
    run = RunDir(folder / "run")
    recipe = {
        "kind": "rl",
        "name": "tracked",
        "model": {"name": "some/model"},
        "max_steps": 1,
        "environments": {"train": [{"id": "reverse-text", "args": {"db_pass": "hunter2x", "text": TOKEN}}]},
        "tracking": tracking,
    }
    tracker = process_plan(Role.TRACKER, on_exit=OnExit.OPTIONAL, accelerators=0)
    make_plan(run.root, recipe, processes=[tracker])
    write_text(run.recipe, json.dumps(recipe))
    text = f"PGPASS=hunter2x {TOKEN}"
    row = {
        "env": "e",
        "task": text,
        "step": 1,
        "reward": 1.0,
        "advantage": 0.0,
        "prompt": text,
        "completion": text,
    }
    append_json(run.traces("train"), row | {"messages": [{"role": "user", "chars": len(text)}]})
    MetricsWriter(run.metrics("orchestrator")).write(1, {"reward/mean": 1.0})
    append_json(run.events, {"time": 1.0, "event": "attempt_started", "attempt": 1, "message": text})
    write_json(run.job, {"scheduler": "local", "job_id": "1", "attempt": 1, "submitted": 1.0})
    write_json(run.state, {"state": "failed", "attempt": 1, "message": text, "time": 2.0})
    failure = {"attempt": 1, "process": "trainer-0", "node": "n1", "exit_code": 1, "message": text}
    write_json(run.failure, failure | {"log": "x.log", "last_lines": [text]})
    return run


def assert_masked(content: str) -> None:
    assert "hunter2x" not in content and TOKEN not in content
    assert content.count(MASK) > 1


def test_wandb_receives_no_secret_of_the_recipe_or_of_rollouts(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run = leaking_run(tmp_path, {"wandb": {"id": "chosen", "log_extras": {"interval": 1}}})
    write_json(run.state, {"state": "done"})
    with serve_wandb() as server:
        tracker = start_role(run, "main", "tracker-0", WANDB_BASE_URL=server.url, WANDB_API_KEY=API_KEY)
        try:
            wait_for(lambda: run.tracker_state("wandb").exists(), "the row to be sent")
        finally:
            tracker.send_signal(signal.SIGTERM)
            assert tracker.wait(timeout=PATIENCE_S) == 0
    (found,) = server.runs.values()
    tables = [data.decode() for name, data in found.files.items() if name.startswith("media/table/")]
    assert tables
    assert_masked(found.config)
    assert_masked("".join(tables))
    everything = found.config + "".join(found.lines.values()) + repr(found.files)
    assert "hunter2x" not in everything and TOKEN not in everything


def test_the_prime_platform_receives_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_API_KEY", KEY)
    with serve_prime() as server:
        run = leaking_run(tmp_path, {"prime": {"base_url": server.base_url, "log_extras": {"interval": 1}}})
        relay = Relay(run, load_plan(run).phase("main").recipe, "prime", Event())
        relay.send(is_last=True)
        relay.finish()
    (table,) = server.tables
    assert_masked(json.dumps(table, default=str))
    assert "hunter2x" not in json.dumps(server.calls) and TOKEN not in json.dumps(server.calls)


def test_a_report_and_a_diagnosis_contain_no_secret(tmp_path: Path) -> None:
    run = leaking_run(tmp_path, {})
    for command, arguments in ((report_command, []), (diagnose_command, []), (diagnose_command, ["--json"])):
        done = CliRunner().invoke(command, [str(run.root), *arguments], catch_exceptions=False)
        assert_masked(run.report.read_text() if command is report_command else done.output)


def test_a_variable_passed_by_name_reaches_its_role_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "outputs" / "tiny", rows=10)
    monkeypatch.setenv("MY_HUB_TOKEN", TOKEN)
    monkeypatch.setattr(sys, "argv", ["primerl-hpc", "submit", "--set", f"env.X={TOKEN}"])
    loaded = load_recipe(TINY, overrides=["env.HF_TOKEN={from: MY_HUB_TOKEN}"], environ={})
    run, plan = prepare_run(loaded, load_profile("local", environ={}), tmp_path / "run")
    for path in run.root.rglob("*"):
        if path.is_file():
            assert TOKEN not in path.read_text(errors="replace"), path
    assert "HF_TOKEN" in run.recipe.read_text()
    process = plan.phase("main").process(process_name(Role.TRAINER, 0))
    assert process.inherited_env == {"HF_TOKEN": "MY_HUB_TOKEN"} and "HF_TOKEN" not in process.env
    assert Launch(process, run, "main", 1, 0).environment["HF_TOKEN"] == TOKEN
    assert type(plan).model_validate(json.loads(run.plan.read_text())) == plan


def test_an_unset_variable_to_be_passed_is_refused_at_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "outputs" / "tiny", rows=10)
    monkeypatch.delenv("MY_HUB_TOKEN", raising=False)
    loaded = load_recipe(TINY, overrides=["env.HF_TOKEN={from: MY_HUB_TOKEN}"], environ={})
    with pytest.raises(ConfigError, match="MY_HUB_TOKEN, which is not set"):
        prepare_run(loaded, load_profile("local", environ={}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


SECRETS = {
    "HF_TOKEN": TOKEN,
    "WANDB_API_KEY": "w",
    "AWS_SECRET_ACCESS_KEY": "a",
    "SLURM_JWT": "j",
    "SSH_AUTH_SOCK": "/tmp/agent",
}


def test_programs_that_a_model_drives_see_none_of_the_submitters_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that an environment server starts inherit its environment, and a model may write them."""
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "outputs" / "tiny", rows=10)
    overrides = ["env.MINE=1", "env.GIVEN={from: HF_TOKEN}", "tracking={wandb: {}}"]
    loaded = load_recipe(TINY, overrides=overrides, environ={})
    plan = compile_plan(
        resolve(loaded),
        load_profile("local", environ={}).profile,
        run_dir=str(tmp_path),
        python=sys.executable,
    )
    phase = plan.phase("main")
    show = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]

    def seen_by(name: str) -> dict[str, str]:
        outer = {**os.environ, **SECRETS, "LC_TIME": "C", "PATH": os.environ["PATH"]}
        code = (
            "import json, os, sys; from pathlib import Path; from primerl_hpc.run.rundir import RunDir;"
            "from primerl_hpc.plan.plan import ProcessPlan; from primerl_hpc.runtime.step import Launch;"
            "process = ProcessPlan.model_validate_json(sys.argv[1]);"
            "os.environ.update(Launch(process, RunDir(Path(sys.argv[2])), 'main', 1, 0).environment);"
            "os.execv(sys.executable, [sys.executable, '-m', 'primerl_hpc.runtime.steps.guard', '--', *sys.argv[3:]])"
        )
        arguments = [phase.process(name).model_dump_json(), str(tmp_path), *show]
        done = captured(
            [sys.executable, "-c", code, *arguments], env=outer | {"PYTHONPATH": str(ROOT)}, check=True
        )
        return json.loads(done.stdout)

    for role in (Role.ENV_SERVER, Role.TRAINER, Role.ORCHESTRATOR, Role.INFERENCE, Role.ROUTER):
        name = process_name(role, 0)
        environment = seen_by(name)
        assert not SECRETS.keys() & environment.keys(), name
        assert environment["MINE"] == "1" and environment["GIVEN"] == TOKEN, "what the recipe names is meant"
        assert environment["LC_TIME"] == "C" and environment["PRIMERL_PROCESS"] == name
    tracker = seen_by(process_name(Role.TRACKER, 0))
    assert {name: tracker[name] for name in SECRETS.keys() & tracker.keys()} == {"WANDB_API_KEY": "w"}


CANARIES = {
    "MY_LAB_NOTES": "x",
    "EDITOR": "vi",
    "AWS_SECRET_ACCESS_KEY": "a",
    "HF_TOKEN": TOKEN,
    "VLLM_API_KEY": "k",
}
GIVEN = {"LC_TIME": "C", "NCCL_DEBUG": "INFO", "SLURM_CPUS_ON_NODE": "4", "MODULEPATH": "/m", "MINE": "1"}


@pytest.mark.parametrize("is_here", [False, True], ids=["local run", "in an allocation"])
def test_a_run_on_this_machine_gets_listed_variables_and_no_secret_of_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_here: bool
) -> None:
    """The job's script and all processes below it see no other variable."""
    ended = tmp_path / "tmp-of-an-ended-job"
    for name, value in {**CANARIES, **GIVEN, "TMPDIR": str(ended), "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    run, script, output = RunDir(tmp_path / "run"), tmp_path / "job.sh", tmp_path / "environment.json"
    dump = "import json, os; open('{0}.new', 'w').write(json.dumps(dict(os.environ))); os.rename('{0}.new', '{0}')"
    script.write_text(f'{sys.executable} -c "{dump.format(output)}"\n')
    write_json(run.plan, {"submit_keep": ["MINE"], "submit_drop": []})
    if is_here:
        monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
        start_here(run, script, 1)
    else:
        submit_script(run, script, "local")
    wait_for(output.exists, "the script to end")
    environment = json.loads(output.read_text())
    assert not CANARIES.keys() & environment.keys()
    assert {name: environment[name] for name in GIVEN} == GIVEN
    assert "TMPDIR" not in environment
    assert environment["PATH"] == os.environ["PATH"] and environment["SLURM_JOB_ID"] == "7"


@pytest.mark.parametrize(
    ("mode", "is_own", "is_used"),
    [
        (0o700, True, True),
        (0o755, True, True),
        (0o777, True, False),
        (0o1777, True, True),
        (0o1777, False, False),
    ],
)
def test_a_run_on_this_machine_uses_no_tmpdir_in_which_others_can_replace_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, is_own: bool, is_used: bool
) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(mode)
    if not is_own:
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder to another user")
        os.chown(folder, NOBODY, NOBODY)
    monkeypatch.setenv("TMPDIR", str(folder))
    assert ("TMPDIR" in environ_here(PassedVariables())) == is_used


def test_a_dry_run_counts_variables_that_do_not_reach_the_run_and_names_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    command = [unusable_sft_recipe(tmp_path), "--profile", "local", "--dry-run"]
    done = CliRunner().invoke(submit_command, command, catch_exceptions=False)
    assert "variables of this shell reach the run" in done.stdout
    assert "note: HF_TOKEN, VLLM_API_KEY of this shell do not reach the run" in done.stderr
    found = json.loads(
        CliRunner().invoke(submit_command, [*command, "--json"], catch_exceptions=False).stdout
    )
    assert set(CANARIES) <= set(found["environment_left_out"]) and "PATH" in found["environment"]
