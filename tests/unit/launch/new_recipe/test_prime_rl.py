"""`import-config`: keys of prime-rl keep their meaning, and those without a counterpart are listed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from primerl_hpc.cli.main import cli
from primerl_hpc.common.errors import ConfigError, ExitCode, NotFoundError, OccupiedError
from primerl_hpc.common.validate import all_paths
from primerl_hpc.launch.new_recipe.prime_rl import MOVED, TABLES, convert
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.recipe.schema.recipe import Recipe
from tests.support.helpers import ROOT

RL = """
max_steps = 200
seq_len = 2048
output_dir = "outputs"
[deployment]
num_train_gpus = 2
num_infer_gpus = 4
gpus_per_node = 8
[model]
name = "Qwen/Qwen3-4B-Instruct-2507"
[wandb]
project = "sort"
[trainer.model]
seq_len = 4096
[trainer.model.lora]
rank = 32
alpha = 64
[trainer.optim]
lr = 1e-5
betas1 = 0.8
[trainer.scheduler]
type = "cosine"
min_lr = 1e-6
[trainer.loss]
type = "default"
kl_tau = 0.01
[orchestrator]
batch_size = 128
group_size = 8
oversampling_factor = 2.0
[orchestrator.train]
filter_zero_advantages = true
[orchestrator.train.sampling]
max_completion_tokens = 768
[[orchestrator.train.env]]
name = "sort"
taskset = { id = "alphabet-sort", min_turns = 3 }
harness = { id = "null", runtime = { type = "subprocess" } }
curriculum = { type = "easy" }
[[orchestrator.train.env]]
id = "reverse-text"
args = { split = "train" }
ratio = 0.5
harness = { id = "opencode", runtime = { type = "docker" } }
[orchestrator.eval]
interval = 50
num_examples = -1
[[orchestrator.eval.env]]
id = "reverse-text"
group_size = 4
[ckpt]
interval = 20
[weight_broadcast]
type = "nccl"
[inference.vllm]
tensor_parallel_size = 2
max_num_seqs = 64
[slurm]
partition = "gpu"
"""


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["import-config", *words], standalone_mode=False)


def test_a_configuration_becomes_a_recipe_that_loads(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text(RL)
    out = tmp_path / "my.yaml"
    done = run(str(tmp_path / "rl.toml"), "--out", str(out))
    assert done.return_value == ExitCode.DONE, done.output
    recipe = load_recipe(str(out), environ={}).recipe
    assert (recipe.name, recipe.max_steps, recipe.seq_len) == ("rl", 200, 2048)
    assert recipe.lora is not None and (recipe.lora.rank, recipe.lora.alpha) == (32, 64)
    assert recipe.optimizer.lr == 1e-5 and recipe.optimizer.model_dump()["betas"] == (0.8, 0.999)
    assert recipe.scheduler.model_dump()["min_lr_ratio"] == pytest.approx(0.1)
    assert (recipe.loss.type, recipe.loss.model_dump()["kl_tau"]) == ("dppo", 0.01)
    assert (recipe.rollouts.batch_size, recipe.rollouts.zero_advantage) == (128, "drop")
    assert recipe.rollouts.sampling.max_tokens == 768
    assert (recipe.layout.trainer.ranks, recipe.layout.inference.replicas) == (2, 2)
    assert recipe.weights.transport == "filesystem" and recipe.checkpoint.interval == 20
    assert recipe.inference.extra_args == {"max_num_seqs": 64}
    first, second = recipe.environments.train
    assert (first.id, first.name, first.args, first.env_args) == (
        "alphabet-sort",
        "sort",
        {"min_turns": 3},
        {},
    )
    assert second.ratio == 0.5 and second.args == {"split": "train"}
    assert second.env_args == {"agent": {"harness": {"id": "opencode"}, "runtime": {"type": "docker"}}}
    (held_out,) = recipe.environments.eval
    assert (held_out.interval, held_out.samples, held_out.num_tasks) == (50, 4, None)
    text = out.read_text()
    for line in (
        "# no counterpart: orchestrator.oversampling_factor",
        "# no counterpart: orchestrator.train.env[0].curriculum",
        "# set elsewhere: slurm.partition: the cluster profile",
        "# set elsewhere: output_dir: --run-dir of submit",
        "# conflict: trainer.model.seq_len = 4096 differs from seq_len = 2048",
    ):
        assert line in text, text
    assert isinstance(run(str(tmp_path / "rl.toml"), "--out", str(out)).exception, OccupiedError)


def test_later_files_take_precedence_and_an_invalid_recipe_is_reported(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(RL)
    (tmp_path / "more.toml").write_text("[orchestrator]\ngroup_size = 7\n[trainer.optim]\nlr = 2e-5\n")
    files = [str(tmp_path / name) for name in ("base.toml", "more.toml")]
    done = run(*files, "--json")
    assert done.return_value == ExitCode.CONFIG and "batch_size" in done.stderr
    shown = json.loads(done.stdout)
    assert shown["recipe"]["optimizer"]["lr"] == 2e-5 and shown["recipe"]["rollouts"]["group_size"] == 7
    assert shown["origins"]["optimizer.lr"] == "trainer.optim.lr" and "batch_size" in shown["problem"]


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        (None, NotFoundError, "no such file"),
        ("max_steps = ", ConfigError, "is not valid TOML"),
        ("max_steps = 5\n[data]\nname = 'x'\n", ConfigError, "not an rl.toml"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str | None, kind: type[Exception], says: str) -> None:
    if text is not None:
        (tmp_path / "rl.toml").write_text(text)
    refused = run(str(tmp_path / "rl.toml"))
    assert isinstance(refused.exception, kind) and says in str(refused.exception)


def test_settings_that_change_their_form() -> None:
    tables = {"orchestrator": {}, "weight_broadcast": {"type": "nccl"}, "trainer": {"loss": {"type": "ipo"}}}
    assert convert(tables, name="x").values["weights"] == {"transport": "broadcast"}
    assert convert(tables, name="x").values["loss"] == {"type": "ipo"}
    tables = {"orchestrator": {}, "weight_broadcast": {"type": "nixl"}, "trainer": {"model": {"compile": {}}}}
    found = convert(tables, name="x")
    assert found.unknown == ["weight_broadcast.type = nixl"] and found.values["trainer"] == {"compile": True}


def test_trackers_keep_their_names_and_what_they_send() -> None:
    monitor = {
        "run_name": "sort",
        "api_key_var": "MY_KEY",
        "frontend_url": "x",
        "log_extras": {"interval": 5},
    }
    wandb = {"project": "p", "log_extras": {"samples": False, "sample_ratio": 0.5}}
    found = convert({"orchestrator": {"prime_monitor": monitor, "wandb": wandb}}, name="x")
    assert found.values["tracking"] == {
        "prime": {"run_name": "sort", "key_variable": "MY_KEY", "log_extras": {"interval": 5}},
        "wandb": {"project": "p", "log_extras": {"samples": False, "sample_ratio": 0.5}},
    }
    assert found.unknown == ["orchestrator.prime_monitor.frontend_url"]
    assert convert({"orchestrator": {}, "monitors": {"prime": {}}}, name="x").values["tracking"] == {
        "prime": {}
    }


def test_every_key_of_the_tables_exists_in_recipes() -> None:
    known = {
        *all_paths(Recipe),
        "log.json",
        "env_by_role.trainer",
        "env_by_role.orchestrator",
        "env_by_role.inference",
    }
    assert not [key for key in (*MOVED.values(), *(own for own, _ in TABLES.values())) if key not in known]
    page = (ROOT / "docs" / "migration.md").read_text()
    rows = [line.split("|")[2] for line in page.splitlines() if line.startswith("| `")]
    named = [key for row in rows for key in re.findall(r"`([a-z_]+(?:\.[a-z0-9_]+)+)", row)]
    assert len(named) > 40 and not [key for key in named if key not in known]


@pytest.mark.parametrize(("theirs", "ours"), [("fp8", "blockwise"), ("mxfp8", "mxfp8")])
def test_the_trainers_quantization_is_converted(theirs: str, ours: str) -> None:
    tables = {"orchestrator": {}, "trainer": {"model": {"quantization": {"type": theirs}}}}
    found = convert(tables, name="r")
    assert found.values["trainer"]["fp8"] == ours and not found.unknown
