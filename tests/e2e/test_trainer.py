"""The trainer as a role: real torchrun groups on CPU, on synthetic rollouts."""

import contextlib
import gzip
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from primerl_hpc.common.errors import ExitCode  # noqa: E402
from primerl_hpc.common.files import read_json, write_json, write_text  # noqa: E402
from primerl_hpc.common.names import Kind, Role  # noqa: E402
from primerl_hpc.common.waiting import wait_until  # noqa: E402
from primerl_hpc.launch.fork import import_checkpoint  # noqa: E402
from primerl_hpc.launch.resume.rewind import rewind  # noqa: E402
from primerl_hpc.recipe.schema.recipe import Recipe  # noqa: E402
from primerl_hpc.run.metrics import read_steps  # noqa: E402
from primerl_hpc.run.rundir import RunDir  # noqa: E402
from primerl_hpc.run.step_dirs import STABLE  # noqa: E402
from primerl_hpc.trainer.checkpoint.saver import Saver  # noqa: E402
from primerl_hpc.trainer.sft_loop import train_sft  # noqa: E402
from primerl_hpc.trainer.watchdog import Watchdog  # noqa: E402
from primerl_hpc.transport.rollouts.filesystem import FilesystemSender  # noqa: E402
from primerl_hpc.transport.rollouts.micro_batch import StepInfo  # noqa: E402
from primerl_hpc.transport.weights.filesystem import FilesystemWeightReader  # noqa: E402
from tests.support.checksums import verify_checksums  # noqa: E402
from tests.support.helpers import (  # noqa: E402
    PATIENCE_S,
    end_role,
    make_plan,
    make_tiny_model,
    process_plan,
    random_row,
    run_role,
    start_role,
)

pytestmark = pytest.mark.e2e

ROWS = 4
FRUGAL = {
    "param_dtype": "float32",
    "activation_checkpointing": "full",
    "activation_offload": True,
    "optimizer_offload": True,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), rows=300, hidden=64)


def rl_recipe(model: Path, **changes) -> dict:
    base = {
        "kind": "rl",
        "name": "test",
        "model": {"name": str(model), "dtype": "float32", "renderer": {"name": "chatml"}},
        "seq_len": 128,
        "max_steps": 3,
        "environments": {"train": [{"id": "reverse-text"}]},
        "rollouts": {"batch_size": 16, "group_size": 8, "sampling": {"max_tokens": 12}},
        "optimizer": {"type": "adamw", "lr": 1e-3},
        "trainer": {"param_dtype": "float32", "activation_checkpointing": "none"},
    }
    return base | changes


def make_run(folder: Path, recipe: dict, model: Path, *, ranks: int, role: Role = Role.TRAINER) -> RunDir:
    make_plan(folder, recipe, processes=[process_plan(role, accelerators=ranks)], model_path=model)
    return RunDir(folder)


def send(run: RunDir, steps, *, ranks: int, spoil: bool = False) -> None:
    """Send the same rows for any number of ranks."""
    for step in steps:
        rng = np.random.default_rng(step)
        rows = [random_row(rng, rng.integers(5, 40, 3).tolist(), num_envs=2) for _ in range(ROWS)]
        if spoil:
            rows[-1].advantages[:] = np.nan
        info = StepInfo(step=step, env_names=["a", "b"])
        FilesystemSender(run).send(info, [rows[rank::ranks] for rank in range(ranks)])


def deal(run: RunDir, steps, *, ranks: int) -> None:
    """`send` for a number of ranks that does not divide the rows: idle ranks get an untrained token."""
    for step in steps:
        rng = np.random.default_rng(step)
        rows = [random_row(rng, rng.integers(5, 40, 3).tolist(), num_envs=2) for _ in range(ROWS)]
        dealt = [rows[rank::ranks] for rank in range(ranks)]
        empty = random_row(rng, [1])
        empty.loss_mask[:], empty.rl_weights[:] = False, 0
        most = max(map(len, dealt))
        FilesystemSender(run).send(
            StepInfo(step=step, env_names=["a", "b"]), [each + [empty] * (most - len(each)) for each in dealt]
        )


def curve(run: RunDir, role: str = "trainer", *names: str) -> np.ndarray:
    kl = ("mismatch_kl/b/mean", "mismatch_kl/b/std", "mismatch_kl/b/max")
    names = names or ("loss/mean", "optim/grad_norm", "optim/zero_grad_ratio", "entropy/all/mean", *kl)
    return np.array([[row[name] for name in names] for row in read_steps(run.metrics(role)).values()])


def outcome(run: RunDir, name: str = "trainer-0") -> dict:
    return read_json(run.control / "outcomes" / f"{name}.json")


@pytest.fixture(scope="module")
def straight(tiny, tmp_path_factory) -> RunDir:
    """Three RL steps on one rank with default settings."""
    run = make_run(tmp_path_factory.mktemp("straight"), rl_recipe(tiny / "model"), tiny / "model", ranks=1)
    send(run, (1, 2, 3), ranks=1)
    code, log = run_role(run, "main", "trainer-0")
    assert code == 0, log
    assert "step 3/3" in log
    return run


def test_the_trainer_completes_with_one_complete_policy_version_per_step(straight):
    assert outcome(straight) == {"process": "trainer-0", "outcome": "done", "step": 3}
    reader = FilesystemWeightReader(straight)
    assert reader.newest() == 3
    verify_checksums(reader.open(3, "test"))
    reader.close(3, "test")


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {}),
        (4, {"layout": {"trainer": {"replicate": 2}}}),
        (3, {"trainer": {"param_dtype": "float32", "activation_checkpointing": "full"}}),
        (2, {"trainer": FRUGAL}),
        (
            2,
            {"trainer": {"param_dtype": "float32", "activation_checkpointing": ["mlp"], "cpu_offload": True}},
        ),
    ],
    ids=[
        "2-ranks",
        "hsdp-2x2",
        "3-ranks-uneven-recomputed",
        "activations-and-optimizer-offloaded",
        "mlp-recomputed-weights-offloaded",
    ],
)
def test_losses_and_gradients_do_not_depend_on_the_number_of_ranks(
    straight, tiny, tmp_path, forked_ranks, ranks, changes
):
    run = make_run(tmp_path, rl_recipe(tiny / "model", **changes), tiny / "model", ranks=ranks)
    deal(run, (1, 2, 3), ranks=ranks)
    code, log = forked_ranks(run, "trainer-0")
    assert code == 0, log
    np.testing.assert_allclose(curve(run), curve(straight), rtol=1e-5, atol=1e-6)


def test_a_stopped_run_resumes_exactly_on_another_number_of_ranks(straight, tiny, tmp_path, forked_ranks):
    """When the trainer is stopped while it waits for a batch, the last step is saved although no checkpoint was due."""
    model = tiny / "model"
    run = make_run(tmp_path, rl_recipe(model), model, ranks=2)
    send(run, (1, 2), ranks=2)
    process = start_role(run, "main", "trainer-0")
    try:
        wait_until(
            lambda: 2 in run.stable_weights() or process.poll() is not None, what="v2", timeout_s=PATIENCE_S
        )
        write_text(run.stop_request, "")
        assert process.wait(PATIENCE_S) == 0
    finally:
        end_role(process)
    assert outcome(run) == {"process": "trainer-0", "outcome": "stopped", "step": 2}
    assert run.finish_checkpoint_side(2, "orchestrator", ("trainer", "orchestrator"))
    run.stop_request.unlink()
    run.delete_step(run.weights_step(2), STABLE)

    make_plan(
        tmp_path, rl_recipe(model), processes=[process_plan(Role.TRAINER, accelerators=1)], model_path=model
    )
    send(run, (3,), ranks=1)
    code, log = forked_ranks(run, "trainer-0")
    assert code == 0, log
    np.testing.assert_allclose(curve(run), curve(straight), rtol=1e-5, atol=1e-6)
    assert 2 in run.stable_weights()
    assert not list(run.checkpoints.rglob(".metadata"))


def test_muon_on_experts_does_not_depend_on_ranks_and_resumes(tmp_path, forked_ranks):
    """Compare an uninterrupted run on one rank with one on three ranks that resumes on two. Four experts: 2, 2 and 0
    per rank."""
    model = make_tiny_model(tmp_path / "moe", experts=4, rows=1, hidden=32, layers=2) / "model"
    muon = {"type": "muon", "lr": 3e-3}
    straight = make_run(tmp_path / "straight", rl_recipe(model, optimizer=muon), model, ranks=1)
    send(straight, (1, 2, 3), ranks=1)
    code, log = forked_ranks(straight, "trainer-0")
    assert code == 0, log

    run = make_run(tmp_path / "run", rl_recipe(model, optimizer=muon, max_steps=2), model, ranks=3)
    deal(run, (1, 2), ranks=3)
    code, log = forked_ranks(run, "trainer-0")
    assert code == 0, log
    assert run.finish_checkpoint_side(2, "orchestrator", ("trainer", "orchestrator"))
    make_run(tmp_path / "run", rl_recipe(model, optimizer=muon), model, ranks=2)
    deal(run, (3,), ranks=2)
    code, log = forked_ranks(run, "trainer-0")
    assert code == 0, log
    assert "resumed from checkpoint 2" in log
    np.testing.assert_allclose(curve(run), curve(straight), rtol=1e-4, atol=1e-6)


def test_non_finite_gradients_are_skipped_by_all_ranks_and_end_the_run_if_they_persist(
    tiny, tmp_path, forked_ranks
):
    recipe = rl_recipe(tiny / "model", max_steps=9)
    recipe["trainer"]["max_skipped_steps"] = 2
    run = make_run(tmp_path, recipe, tiny / "model", ranks=2)
    send(run, (1, 3, 4), ranks=2, spoil=True)
    send(run, (2,), ranks=2)
    assert forked_ranks(run, "trainer-0")[0] == ExitCode.NO_CONTINUE
    error = read_json(run.control / "errors" / "trainer-0.json")
    assert error["exit_code"] == ExitCode.NO_CONTINUE
    assert "not finite in 2 consecutive steps, the last one 4" in error["message"]
    assert curve(run, "trainer", "optim/skipped", "loss/nan_count").tolist() == [[1, 1], [0, 0], [1, 1]]
    for shard in run.weights_step(2).glob("model-*"):
        skipped = load_file(run.weights_step(3) / shard.name)
        assert all(torch.equal(value, skipped[name]) for name, value in load_file(shard).items())


def test_a_hung_rank_is_named_with_its_stack_and_the_collective_it_misses(tiny, tmp_path):
    """Rank 1's file of the batch is a pipe without a writer."""
    run = make_run(
        tmp_path, rl_recipe(tiny / "model", timeouts={"trainer_hang_s": 30}), tiny / "model", ranks=2
    )
    send(run, (1,), ranks=2)
    path = run.rollouts_step(1) / "rank_1.safetensors"
    path.unlink()
    os.mkfifo(path)
    assert run_role(run, "main", "trainer-0")[0] != 0
    error = read_json(run.control / "errors" / "trainer-0.json")
    assert error["exit_code"] == ExitCode.FAILED
    assert "no progress in" in error["message"]
    assert "rank 0 waited in all_reduce" in error["message"]
    assert "without rank 1" in error["message"]
    stacks = [each.read_text() for each in (run.attempt_logs(1) / "trainer").rglob("1/stderr.log")]
    assert "read_rank" in "".join(stacks)


def test_an_incomplete_model_folder_is_refused_in_one_sentence(tmp_path):
    run = make_run(tmp_path / "run", rl_recipe(tmp_path / "none"), tmp_path / "none", ranks=1)
    code, log = run_role(run, "main", "trainer-0")
    assert code != 0
    error = read_json(run.control / "errors" / "trainer-0.json")
    assert error["exit_code"] == ExitCode.DATA
    assert error["message"] == f"{tmp_path / 'none'}: not a model folder: config.json is missing"
    assert 'Traceback (most recent call last):\n  File "/work' not in log


def tied_model(folder: Path) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["experts", "tied"])
def test_exported_tensors_equal_the_loaded_ones_without_training(tmp_path, forked_ranks, kind):
    """Names per expert on disk and fused tensors in memory; tied heads; 101 or 104 rows sharded over three ranks."""
    if kind == "experts":
        model = make_tiny_model(tmp_path / "moe", experts=4, rows=1, hidden=32, layers=2) / "model"
    else:
        model = tied_model(tmp_path / "tied")
    recipe = rl_recipe(model, max_steps=1, optimizer={"type": "sgd", "lr": 1e-30, "momentum": 0.0})
    run = make_run(tmp_path / "run", recipe, model, ranks=3)
    rng = np.random.default_rng(0)
    FilesystemSender(run).send(StepInfo(step=1), [[random_row(rng, [9, 12])] for _ in range(3)])
    code, log = forked_ranks(run, "trainer-0")
    assert code == 0, log
    base = load_file(model / "model.safetensors")
    folder = run.weights_step(1)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(base)
    for name, file in index.items():
        torch.testing.assert_close(load_file(folder / file)[name], base[name], rtol=0, atol=1e-12)


# -- supervised ------------------------------------------------------------------------------------


def sft_recipe(tiny: Path, **changes) -> dict:
    data = {"path": str(tiny / "sft.jsonl")}
    base = rl_recipe(tiny / "model")
    del base["environments"], base["rollouts"]
    return (
        base
        | {
            "kind": "sft",
            "max_steps": 40,
            "sft": {
                "data": data,
                "batch_unit": "samples",
                "batch_size": 32,
                "validation": {"data": data | {"num_rows": 20}, "interval": 20},
            },
            "optimizer": {"type": "adamw", "lr": 3e-3},
            "checkpoint": {"interval": 20},
        }
        | changes
    )


def test_sft_learns_validates_and_leaves_a_model_that_transformers_loads(tiny, tmp_path, forked_ranks):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    bare = tmp_path / "bare"  # the tokenizer lies elsewhere
    shutil.copytree(tiny / "model", bare, ignore=shutil.ignore_patterns("token*", "*.jinja"))
    model = {"name": str(bare), "tokenizer": str(tiny / "model")}
    recipe = sft_recipe(tiny, model={**sft_recipe(tiny)["model"], **model})
    validation = recipe["sft"]["validation"]
    # one of two ranks has nothing to validate
    validation["data"]["num_rows"], validation["at_start"] = (1, True)
    run = make_run(tmp_path / "run", recipe, bare, ranks=2, role=Role.SFT)
    write_json(run.profile_request, {"id": "first", "steps": 2, "ranks": [1]})
    code, log = forked_ranks(run, "sft-0")
    assert code == 0, log
    assert outcome(run, "sft-0")["outcome"] == "done"
    with gzip.open(run.profile_trace("first", 1), "rt") as trace:
        named = [event.get("name") for event in json.load(trace)["traceEvents"]]
    assert "aten::mm" in named and not run.profile_trace("first", 0).exists()
    losses = curve(run, "sft", "loss/mean")[:, 0]
    assert losses[0] > 4
    assert losses[-1] < 3
    steps = read_steps(run.metrics("sft"))
    assert steps[1]["val/initial_loss"] > 4
    assert steps[40]["val/loss"] < 3
    assert run.complete_checkpoints() == [20, 40]
    folder = run.weights_step(40)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("abc", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(tiny / "model").chat_template


def test_an_sft_row_without_its_columns_is_named(tiny, tmp_path, forked_ranks):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n')
    recipe = sft_recipe(tiny)
    recipe["sft"] = {"data": {"path": str(tmp_path / "bad.jsonl")}}
    run = make_run(tmp_path / "run", recipe, tiny / "model", ranks=2, role=Role.SFT)
    code, log = forked_ranks(run, "sft-0")
    assert code == ExitCode.DATA
    error = read_json(run.control / "errors" / "sft-0.json")
    assert error["exit_code"] == ExitCode.DATA
    assert "bad.jsonl:2: column 'completion' is missing" in error["message"]
    assert error["message"] in log


class DeathError(Exception):
    pass


def test_a_version_to_keep_exists_before_the_checkpoint_of_its_step(tiny, one_rank, monkeypatch, tmp_path):
    """An incarnation that resumes from the checkpoint does not repeat that step, so the version would be missing."""
    checkpoint = {"interval": 1, "asynchronous": False}
    recipe = sft_recipe(tiny, max_steps=2, checkpoint=checkpoint, weights={"interval": 1})
    process = process_plan(Role.SFT, accelerators=1)
    plan = make_plan(tmp_path, recipe, processes=[process], model_path=tiny / "model")
    run, save = RunDir(tmp_path), Saver.save

    def save_and_die(*arguments, **options) -> None:
        save(*arguments, **options)
        raise DeathError

    monkeypatch.setattr(Saver, "save", save_and_die)
    watchdog = Watchdog(run, "sft-0", rank=0, size=1, timeout_s=600)
    with pytest.raises(DeathError):
        train_sft(plan.phases[0], run, one_rank, watchdog)
    watchdog.pause()
    assert run.latest_checkpoint() == 1
    assert list(run.stable_weights()) == [1]


def test_a_failed_background_save_is_repeated_at_a_following_step(tiny, one_rank, tmp_path):
    recipe = sft_recipe(tiny, max_steps=39, checkpoint={"interval": 20, "at_end": False})
    del recipe["sft"]["validation"]
    process = process_plan(Role.SFT, accelerators=1)
    plan = make_plan(tmp_path, recipe, processes=[process], model_path=tiny / "model")
    run = RunDir(tmp_path)
    write_text(run.checkpoint(20), "not a folder")
    watchdog = Watchdog(run, "sft-0", rank=0, size=1, timeout_s=600)
    assert train_sft(plan.phases[0], run, one_rank, watchdog) == ("done", 39)
    watchdog.pause()
    (saved,) = run.complete_checkpoints()
    assert 20 < saved < 40
    assert read_steps(run.metrics("sft"))[39]["checkpoint/failed"] == 1


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved_sft(tiny, tmp_path_factory, forked_ranks) -> RunDir:
    """Ten supervised steps on two ranks, a checkpoint after each."""
    return finished_sft(forked_ranks, tmp_path_factory.mktemp("saved"), long_sft(tiny), tiny)


def long_sft(tiny: Path, **changes) -> dict:
    recipe = sft_recipe(tiny, max_steps=10, checkpoint={"interval": 1, "keep_last": 20})
    del recipe["sft"]["validation"]
    recipe["trainer"]["deterministic"] = True
    recipe["scheduler"] = {"type": "linear", "warmup_steps": 4, "decay_steps": 2}
    return recipe | changes


def finished_sft(
    run_ranks: Callable[[RunDir, str], tuple[int, str]],
    folder: Path,
    recipe: dict,
    tiny: Path,
    ranks: int = 2,
) -> RunDir:
    run = make_run(folder, recipe, tiny / "model", ranks=ranks, role=Role.SFT)
    code, log = run_ranks(run, "sft-0")
    assert code == 0, log
    return run


def kill_all(process) -> None:
    """Send SIGKILL to torchrun and every rank at the same time."""
    family = psutil.Process(process.pid)
    for member in [*family.children(recursive=True), family]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def test_a_run_killed_at_any_moment_ends_with_the_same_bits(saved_sft, tiny, tmp_path, forked_ranks):
    """Kill once during a save and once during a step, both at random times; each step is saved during the next one.

    `tools/bench/kills.py` repeats kills many times, also for trainers of experts and of adapters.
    """
    run = make_run(tmp_path, long_sft(tiny), tiny / "model", ranks=2, role=Role.SFT)
    rng = np.random.default_rng()
    lot, share = int(rng.integers(4, 8)), float(rng.random())
    for step, sign, share_of_step in ((3, "trainer.tmp", 0.0), (lot, "COMPLETE", share)):
        process = start_role(run, "main", "sft-0")
        try:
            sight = run.checkpoint(step) / sign
            wait_until(
                lambda process=process, sight=sight: sight.exists() or process.poll() is not None,
                what=str(sight),
                timeout_s=PATIENCE_S,
                poll_s=0.001,
                poll_max_s=0.002,
            )
            rows = read_steps(run.metrics("sft"))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(share_of_step * rows[max(rows)]["time/step"])
            assert process.poll() is None
            kill_all(process)
        finally:
            end_role(process)
        run.delete_after(run.latest_checkpoint() or 0)  # as the supervisor does before it starts roles again
        assert 2 <= (run.latest_checkpoint() or 0) < 10
    code, log = forked_ranks(run, "sft-0")
    assert code == 0, log
    assert shards_of(run, 10) == shards_of(saved_sft, 10), f"killed {share} of a step after {lot}"


def shards_of(run: RunDir, version: int) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in run.weights_step(version).glob("*.safetensors")}
    assert found
    return found


def test_a_run_that_returns_to_any_kept_step_ends_with_the_same_bits(saved_sft, tmp_path, forked_ranks):
    run = RunDir(tmp_path / "run")
    shutil.copytree(saved_sft.root, run.root)
    plan = read_json(run.plan)
    write_json(run.plan, {**plan, "run_dir": str(run.root)})
    kept, expected = saved_sft.complete_checkpoints(), shards_of(saved_sft, 10)
    assert kept == list(range(1, 11))
    for step in reversed(kept[:-1]):
        folder = rewind(run, Kind.SFT, step).folder
        assert folder is not None and run.latest_checkpoint() == step
        assert list(read_steps(run.metrics("sft")))[-1] == step
        code, log = forked_ranks(run, "sft-0")
        assert code == 0, log
        assert f"resumed from checkpoint {step}" in log
        assert list(read_steps(run.metrics("sft"))) == kept
        assert shards_of(run, 10) == expected, f"after a return to step {step}"
        assert (folder / "checkpoints" / "step_10").is_dir()


def test_a_trainer_of_rollouts_that_returns_to_any_kept_step_ends_with_the_same_bits(
    tiny, tmp_path, forked_ranks
):
    trainer = rl_recipe(tiny / "model")["trainer"] | {"deterministic": True}
    changes = {"max_steps": 4, "checkpoint": {"interval": 1, "keep_last": 9}, "trainer": trainer}
    run = make_run(tmp_path, rl_recipe(tiny / "model", **changes), tiny / "model", ranks=2)

    def train(after: int) -> dict[str, bytes]:
        send(run, range(after + 1, 5), ranks=2)
        code, log = forked_ranks(run, "trainer-0")
        assert code == 0, log
        for step in range(after + 1, 5):
            assert run.finish_checkpoint_side(step, "orchestrator", ("trainer", "orchestrator"))
        assert list(read_steps(run.metrics("trainer"))) == [1, 2, 3, 4]
        return shards_of(run, 4)

    expected = train(0)
    for step in (3, 2, 1):
        assert rewind(run, Kind.RL, step).steps["checkpoints"] == list(range(step + 1, 5))
        assert train(step) == expected, f"after a return to step {step}"


def test_a_fork_continues_another_run_without_the_excluded_state(saved_sft, tiny, tmp_path, forked_ranks):
    names = ("loss/mean", "optim/lr", "progress/total_samples", "progress/num_tokens")

    def forked(name: str, **changes) -> np.ndarray:
        fork = {"run": str(saved_sft.root), "step": 7, **changes}
        recipe = long_sft(tiny, checkpoint={"fork": fork})
        run = make_run(tmp_path / name, recipe, tiny / "model", ranks=2, role=Role.SFT)
        import_checkpoint(run, Recipe.model_validate(recipe))
        code, log = forked_ranks(run, "sft-0")
        assert code == 0, log
        assert "resumed from checkpoint 7" in log
        return curve(run, "sft", *names)

    straight = curve(saved_sft, "sft", *names)
    np.testing.assert_array_equal(forked("whole"), straight[7:])
    anew = forked("anew", skip=["optimizer", "scheduler", "progress", "data"])
    np.testing.assert_allclose(anew[:, 1], 3e-3 * np.array([0.25, 0.5, 0.5]), atol=1e-12)
    np.testing.assert_array_equal(anew[:, 2:], straight[:3, 2:])
    state = read_json(RunDir(tmp_path / "anew").checkpoint_side(10, "trainer") / "state.json")
    assert state["optimizer_updates"] == 3  # of ten
    assert saved_sft.complete_checkpoints() == list(range(1, 11))


def test_a_checkpoint_continues_on_another_layout_to_the_same_weights(
    saved_sft, tiny, tmp_path, forked_ranks
):
    """Continue step 6 of two ranks on one rank: samples and losses are equal, and finally every weight to 1e-6."""
    shutil.copytree(saved_sft.root, tmp_path / "run")
    run = RunDir(tmp_path / "run")
    run.delete_after(6)
    assert run.latest_checkpoint() == 6 and not run.stable_weights()
    finished_sft(forked_ranks, run.root, long_sft(tiny), tiny, ranks=1)
    assert "resumed from checkpoint 6" in (run.attempt_logs(1) / "sft-0.log").read_text()
    names = ("loss/mean", "optim/grad_norm", "progress/total_samples", "progress/num_tokens")
    np.testing.assert_allclose(curve(run, "sft", *names), curve(saved_sft, "sft", *names), rtol=1e-5)
    for shard in saved_sft.weights_step(10).glob("*.safetensors"):
        found = load_file(run.weights_step(10) / shard.name)
        for name, value in load_file(shard).items():
            assert (found[name] - value).norm() <= 1e-6 * value.norm(), name


def test_a_weights_only_checkpoint_resumes_and_a_damaged_shard_is_refused(tiny, tmp_path, forked_ranks):
    checkpoint = {"interval": 1, "weights_only": True, "asynchronous": False}
    run = finished_sft(
        forked_ranks, tmp_path, long_sft(tiny, max_steps=2, checkpoint=checkpoint), tiny, ranks=1
    )
    (shard,) = run.checkpoint_side(2, "trainer").glob("*.safetensors")
    assert all(name.startswith("model.") for name in load_file(shard))
    finished_sft(forked_ranks, tmp_path, long_sft(tiny, max_steps=3, checkpoint=checkpoint), tiny, ranks=2)
    assert run.latest_checkpoint() == 3
    shard = min(run.checkpoint_side(3, "trainer").glob("*.safetensors"))
    *data, last = shard.read_bytes()
    shard.write_bytes(bytes([*data, last ^ 1]))
    make_run(
        tmp_path, long_sft(tiny, max_steps=4, checkpoint=checkpoint), tiny / "model", ranks=1, role=Role.SFT
    )
    assert forked_ranks(run, "sft-0")[0] == ExitCode.DATA
    error = read_json(run.control / "errors" / "sft-0.json")
    assert error["exit_code"] == ExitCode.DATA
    assert f"{run.checkpoint_side(3, 'trainer')}: the checkpoint is damaged: {shard.name}" in error["message"]
    assert error["message"].endswith("to continue from checkpoint 2")


FLOAT16 = {"param_dtype": "float16", "loss_scale_growth": 2, "activation_checkpointing": "full"}


def send_overflowing(run: RunDir, step: int, *, ranks: int, advantage: float) -> None:
    """Send one row per rank; the last rank's has a gradient that overflows float16, and a finite loss."""
    rng = np.random.default_rng(step)
    rows = [random_row(rng, [12, 9], num_envs=2) for _ in range(ranks)]
    rows[-1].advantages[:] = advantage
    FilesystemSender(run).send(StepInfo(step=step, env_names=["a", "b"]), [[row] for row in rows])


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_a_resumed_run_has_the_same_bits(
    tiny, tmp_path, forked_ranks, ranks
):
    def train(folder: str, to: int, steps: tuple[int, ...]) -> RunDir:
        recipe = rl_recipe(tiny / "model", trainer=FLOAT16, weights={"interval": 1}, max_steps=to)
        run = make_run(tmp_path / folder, recipe, tiny / "model", ranks=ranks)
        for step in steps:
            if step == 2:
                send_overflowing(run, step, ranks=ranks, advantage=1e6)
            else:
                send(run, (step,), ranks=ranks)
        code, log = forked_ranks(run, "trainer-0")
        assert code == 0, log
        return run

    straight = train("straight", 5, (1, 2, 3, 4, 5))
    # halved by step 2, doubled by steps 3 and 4
    scales = [65536, 65536, 32768, 32768, 65536]
    assert curve(straight, "trainer", "optim/loss_scale").ravel().tolist() == scales
    assert curve(straight, "trainer", "optim/skipped", "loss/nan_count").T.tolist() == [
        [0, 1, 0, 0, 0],
        [0] * 5,
    ]
    before, skipped, after = (exported(straight, version) for version in (1, 2, 3))
    assert before and all(torch.equal(value, skipped[name]) for name, value in before.items())
    assert not any(torch.equal(value, after[name]) for name, value in before.items() if value.ndim == 2)

    resumed = train("resumed", 3, (1, 2, 3))  # between the steps that double the scale
    assert resumed.finish_checkpoint_side(3, "orchestrator", ("trainer", "orchestrator"))
    train("resumed", 5, (4, 5))
    assert curve(resumed, "trainer", "optim/loss_scale").ravel().tolist() == scales
    last = exported(straight, 5)
    assert all(torch.equal(value, last[name]) for name, value in exported(resumed, 5).items())


def exported(run: RunDir, version: int) -> dict:
    return {k: v for shard in run.weights_step(version).glob("model-*") for k, v in load_file(shard).items()}


def test_gradients_that_overflow_at_every_scale_end_the_run(tiny, tmp_path, forked_ranks):
    recipe = rl_recipe(tiny / "model", trainer=FLOAT16 | {"loss_scale": 2.0}, max_steps=9)
    run = make_run(tmp_path, recipe, tiny / "model", ranks=1)
    for step in (1, 2):
        send_overflowing(run, step, ranks=1, advantage=1e12)
    assert forked_ranks(run, "trainer-0")[0] == ExitCode.NO_CONTINUE
    error = read_json(run.control / "errors" / "trainer-0.json")
    assert error["message"].startswith(
        "gradients of step 2 overflow float16 although the scale of the loss is only 1;"
    )
    assert curve(run, "trainer", "optim/loss_scale", "optim/skipped").tolist() == [[2, 1]]
