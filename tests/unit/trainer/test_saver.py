"""Checkpoints of three ranks: a damaged file is refused by name on all ranks, and a save fails on all ranks."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from primerl_hpc.common.errors import PrimerlError  # noqa: E402
from primerl_hpc.common.files import read_json, write_json  # noqa: E402
from primerl_hpc.recipe.schema.layout import TrainerLayout  # noqa: E402
from primerl_hpc.run.rundir import RunDir  # noqa: E402
from primerl_hpc.trainer.checkpoint import saver as saver_module  # noqa: E402
from primerl_hpc.trainer.checkpoint.checkpoint import load_checkpoint  # noqa: E402
from primerl_hpc.trainer.checkpoint.saver import Saver  # noqa: E402
from primerl_hpc.trainer.control import Requests, read_requests  # noqa: E402
from primerl_hpc.trainer.optim.optimizers import make_state, num_updates, state_tensors  # noqa: E402
from primerl_hpc.trainer.parallel.mesh import make_expert_mesh, make_world, to_local  # noqa: E402
from primerl_hpc.trainer.train_step import Trainer, build_trainer  # noqa: E402
from primerl_hpc.trainer.watchdog import Watchdog  # noqa: E402
from tests.support.helpers import small_sft  # noqa: E402
from tests.support.spawned_ranks import spawn_ranks  # noqa: E402
from tests.support.tiny_models import make_family  # noqa: E402

RANKS, CPU, TIMEOUT = 3, torch.device("cpu"), timedelta(seconds=1234)
SECOND = "shard-00002.safetensors"


def delete(side: Path) -> None:
    (side / SECOND).unlink()


def cut_off(side: Path) -> None:
    data = (side / SECOND).read_bytes()
    (side / SECOND).write_bytes(data[:-4])


def flip(side: Path) -> None:
    data = bytearray((side / SECOND).read_bytes())
    data[-1] ^= 1
    (side / SECOND).write_bytes(data)


def leave_out_the_list(side: Path) -> None:
    """Write the state like an older version."""
    state = read_json(side / "state.json")
    del state["shards"]
    write_json(side / "state.json", state)


CHANGES = {2: delete, 3: cut_off, 4: flip, 5: leave_out_the_list}


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except PrimerlError as error:
        return str(error)
    return ""


def load_damaged(run: RunDir, trainer: Trainer) -> dict[str, str]:
    """Return the error of loading each of `CHANGES`; the last two loads succeed."""
    saver = Saver(run, trainer, ("trainer",))
    saver.save(1, in_background=False)
    if trainer.world.is_leader:
        for step, change in CHANGES.items():
            shutil.copytree(run.checkpoint(1), run.checkpoint(step))
            change(run.checkpoint_side(step, "trainer"))
    dist.barrier()
    return {
        str(step): error_of(lambda step=step: load_checkpoint(run, trainer, step, lag_s=0))
        for step in (*CHANGES, 1)
    }


def fail_and_try_again(run: RunDir, trainer: Trainer) -> dict[str, object]:
    saver = Saver(run, trainer, ("trainer",))
    found: dict[str, object] = {}
    if trainer.world.is_leader:
        run.checkpoint(12).write_text("not a folder")
    saver.save(12)
    found["failed"] = saver.wait()
    found["request"] = read_requests(run, trainer.world, has_failed=saver.has_failed)
    saver.save(13)
    found["again"] = error_of(saver.finish)
    write_json(run.stop_request, {"now": True})  # not to be obeyed by a save
    found["request afterwards"] = read_requests(run, trainer.world, has_failed=saver.has_failed)
    no_json = {"position": object()}  # rank 0 alone writes it, after all have written their shards
    saver.save(14, no_json)
    saver.save(15, no_json)
    found["twice"] = error_of(lambda: saver.save(16))
    found["metrics"] = saver.metrics
    return found


def load_to_save_weights_alone(run: RunDir, trainer: Trainer) -> dict[str, object]:
    """Read a checkpoint with AdamW's moments in a run that does not save them."""

    def moments() -> list[torch.Tensor]:
        return [to_local(each) for each in state_tensors(trainer.optimizer, trainer.names).values()]

    make_state(trainer.optimizer, ["exp_avg", "exp_avg_sq"], 7)
    for value in moments():
        value.fill_(0.5)
    with Saver(run, trainer, ("trainer",)) as saver:
        saver.save(20, in_background=False)
    block = trainer.recipe.checkpoint.model_copy(update={"weights_only": True})
    trainer.recipe = trainer.recipe.model_copy(update={"checkpoint": block})
    load_checkpoint(run, trainer, 20, lag_s=0)
    found = {
        "updates": num_updates(trainer.optimizer),
        "are read": all(bool((each == 0.5).all()) for each in moments()),
    }
    with Saver(run, trainer, ("trainer",)) as saver:
        saver.save(21, in_background=False)
    load_checkpoint(run, trainer, 21, lag_s=0)
    return found | {"updates of weights alone": num_updates(trainer.optimizer), "states": len(moments())}


def postpone(run: RunDir, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Ask whether a save is late while its thread cannot write, and afterwards."""
    responds, write = threading.Event(), Saver._write

    def write_later(*arguments) -> None:
        responds.wait()
        write(*arguments)

    monkeypatch.setattr(saver_module, "PATIENCE_S", 0.05)
    monkeypatch.setattr(Saver, "_write", write_later)
    with Saver(run, trainer, ("trainer",)) as saver:
        found: dict[str, object] = {"before": saver.is_late()}
        saver.save(30)
        found["stalled"] = saver.is_late()
        responds.set()
        saver.wait()
        return found | {"after": saver.is_late()}


def timeouts_s(trainer: Trainer) -> set[float]:
    """Return the timeouts of all process groups."""
    copies = make_world(TrainerLayout(replicate=RANKS), CPU, local_rank=0, local_size=RANKS, timeout=TIMEOUT)
    meshes = (trainer.world.mesh, copies.mesh, make_expert_mesh(trainer.world, RANKS))
    groups = [group for mesh in meshes for group in mesh.get_all_groups()]
    groups.append(Saver(RunDir(Path("none")), trainer, ("trainer",))._group)
    assert len({group.group_name for group in groups}) > 3
    return {group._get_backend(CPU).options._timeout.total_seconds() for group in groups}


def run_rank(rank: int, model: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    world = make_world(TrainerLayout(), CPU, local_rank=rank, local_size=RANKS, timeout=TIMEOUT)
    run = RunDir(Path(folder))
    watchdog = Watchdog(run, "sft-0", rank=rank, size=RANKS, timeout_s=600)
    trainer = build_trainer(small_sft(Path(model)), model, world, watchdog)
    found = load_damaged(run, trainer) | fail_and_try_again(run, trainer)
    found["weights alone"] = load_to_save_weights_alone(run, trainer)
    with pytest.MonkeyPatch.context() as patch:
        found["late"] = postpone(run, trainer, patch)
    found["timeouts"] = list(timeouts_s(trainer))
    Path(folder, f"rank_{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Return the results that three ranks have written."""
    folder = tmp_path_factory.mktemp("saver")
    model = make_family("qwen3", folder / "model")
    spawn_ranks(run_rank, RANKS, str(model), str(folder))
    return RunDir(folder)


def found_by_ranks(run: RunDir) -> dict:
    first, *others = (read_json(run.root / f"rank_{rank}.json") for rank in range(RANKS))
    assert all(other == first for other in others)
    return first


def test_a_shard_that_is_missing_or_not_what_was_saved_is_refused_by_its_name(run):
    """torch would not notice that the second of three shards is missing: it infers sizes from the last."""
    found = found_by_ranks(run)
    for step, fault in ((2, "is missing"), (3, "bytes, but state.json lists"), (4, "has CRC-32")):
        message = found[str(step)]
        assert message.startswith(
            f"{run.checkpoint_side(step, 'trainer')}: the checkpoint is damaged: {SECOND} "
        )
        assert fault in message
        assert message.endswith(f"; remove {run.checkpoint(step)} to continue from checkpoint {step - 1}")
    assert found["5"] == found["1"] == ""


def test_a_failed_save_is_tried_again_once_and_leaves_nothing_in_the_way(run):
    """It fails only on rank 0, but all ranks are notified at once: none waits in a barrier."""
    found = found_by_ranks(run)
    assert found["failed"] and found["request"] == Requests.RETRY
    assert found["again"] == "" and found["request afterwards"] == Requests.NONE
    assert run.complete_checkpoints() == [1, *CHANGES, 13, 20, 21, 30]
    assert not run.checkpoint(14).exists() and not run.checkpoint(15).exists()
    assert found["twice"].startswith("writing checkpoint 15 failed: ")
    assert found["metrics"] == {"checkpoint/failed": 3}


def test_moments_that_a_checkpoint_has_are_read_though_the_run_saves_weights_alone(run):
    """Zero moments with a large count of updates would make the first steps zero."""
    assert found_by_ranks(run)["weights alone"] == {
        "updates": 7,
        "are read": True,
        "updates of weights alone": 0,
        "states": 0,
    }


def test_all_ranks_know_that_the_last_save_is_not_written(run):
    assert found_by_ranks(run)["late"] == {"before": False, "stalled": True, "after": False}


def test_ranks_wait_in_every_group_as_long_as_in_the_group_of_all(run):
    assert found_by_ranks(run)["timeouts"] == [TIMEOUT.total_seconds()]
