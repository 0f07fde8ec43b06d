"""Checkpoints of three ranks: what is damaged is refused by its name on all of them, and so is a save that failed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from primerl_hpc.common.errors import PrimerlError  # noqa: E402
from primerl_hpc.common.files import read_json, write_json  # noqa: E402
from primerl_hpc.common.rundir import RunDir  # noqa: E402
from primerl_hpc.recipe.layout_schema import TrainerLayout  # noqa: E402
from primerl_hpc.trainer.checkpoint import load_checkpoint  # noqa: E402
from primerl_hpc.trainer.control import Requests, read_requests  # noqa: E402
from primerl_hpc.trainer.core import Core, build_core  # noqa: E402
from primerl_hpc.trainer.optim import make_state, num_updates, state_tensors  # noqa: E402
from primerl_hpc.trainer.parallel.mesh import local, make_expert_mesh, make_world  # noqa: E402
from primerl_hpc.trainer.saver import Saver  # noqa: E402
from primerl_hpc.trainer.watchdog import Watchdog  # noqa: E402
from tests.e2e.tiny_models import make_family  # noqa: E402
from tests.support import small_sft  # noqa: E402

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
    """As an older version wrote it."""
    state = read_json(side / "state.json")
    del state["shards"]
    write_json(side / "state.json", state)


CHANGES = {2: delete, 3: cut_off, 4: flip, 5: leave_out_the_list}


def said_by(call: Callable[[], object]) -> str:
    try:
        call()
    except PrimerlError as error:
        return str(error)
    return ""


def load_damaged(run: RunDir, core: Core) -> dict[str, str]:
    """What loading each of `CHANGES` says; the last two loads are good ones."""
    saver = Saver(run, core, ("trainer",))
    saver.save(1, in_background=False)
    if core.world.is_leader:
        for step, change in CHANGES.items():
            shutil.copytree(run.checkpoint(1), run.checkpoint(step))
            change(run.checkpoint_side(step, "trainer"))
    dist.barrier()
    return {
        str(step): said_by(lambda step=step: load_checkpoint(run, core, step, lag_s=0))
        for step in (*CHANGES, 1)
    }


def fail_and_try_again(run: RunDir, core: Core) -> dict[str, object]:
    saver = Saver(run, core, ("trainer",))
    found: dict[str, object] = {}
    if core.world.is_leader:
        run.checkpoint(12).write_text("not a folder")
    saver.save(12)
    found["failed"] = saver.wait()
    found["request"] = read_requests(run, core.world, has_failed=saver.has_failed)
    saver.save(13)
    found["again"] = said_by(saver.finish)
    found["request afterwards"] = read_requests(run, core.world, has_failed=saver.has_failed)
    no_json = {"position": object()}  # rank 0 alone writes it, after all have written their shards
    saver.save(14, no_json)
    saver.save(15, no_json)
    found["twice"] = said_by(lambda: saver.save(16))
    found["metrics"] = saver.metrics
    return found


def load_to_save_weights_alone(run: RunDir, core: Core) -> dict[str, object]:
    """A checkpoint with AdamW's moments, read by a run that leaves them out of its own."""

    def moments() -> list[torch.Tensor]:
        return [local(each) for each in state_tensors(core.optimizer, core.names).values()]

    make_state(core.optimizer, ["exp_avg", "exp_avg_sq"], 7)
    for value in moments():
        value.fill_(0.5)
    with Saver(run, core, ("trainer",)) as saver:
        saver.save(20, in_background=False)
    block = core.recipe.checkpoint.model_copy(update={"weights_only": True})
    core.recipe = core.recipe.model_copy(update={"checkpoint": block})
    load_checkpoint(run, core, 20, lag_s=0)
    found = {
        "updates": num_updates(core.optimizer),
        "are read": all(bool((each == 0.5).all()) for each in moments()),
    }
    with Saver(run, core, ("trainer",)) as saver:
        saver.save(21, in_background=False)
    load_checkpoint(run, core, 21, lag_s=0)
    return found | {"updates of weights alone": num_updates(core.optimizer), "states": len(moments())}


def timeouts_s(core: Core) -> set[float]:
    """Of all groups that ranks meet in."""
    copies = make_world(TrainerLayout(replicate=RANKS), CPU, local_rank=0, local_size=RANKS, timeout=TIMEOUT)
    meshes = (core.world.mesh, copies.mesh, make_expert_mesh(core.world, RANKS))
    groups = [group for mesh in meshes for group in mesh.get_all_groups()]
    groups.append(Saver(RunDir(Path("none")), core, ("trainer",))._group)
    assert len({group.group_name for group in groups}) > 3
    return {group._get_backend(CPU).options._timeout.total_seconds() for group in groups}


def run_rank(rank: int, model: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    world = make_world(TrainerLayout(), CPU, local_rank=rank, local_size=RANKS, timeout=TIMEOUT)
    run = RunDir(Path(folder))
    watchdog = Watchdog(run, "sft-0", rank=rank, size=RANKS, timeout_s=600)
    core = build_core(small_sft(Path(model)), model, world, watchdog)
    found = load_damaged(run, core) | fail_and_try_again(run, core)
    found["weights alone"] = load_to_save_weights_alone(run, core)
    found["timeouts"] = list(timeouts_s(core))
    Path(folder, f"rank_{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Of three ranks, which have written what they found."""
    folder = tmp_path_factory.mktemp("saver")
    model = make_family("qwen3", folder / "model")
    torch.multiprocessing.spawn(run_rank, (str(model), str(folder)), nprocs=RANKS)
    return RunDir(folder)


def found_by_ranks(run: RunDir) -> dict:
    first, *others = (read_json(run.root / f"rank_{rank}.json") for rank in range(RANKS))
    assert all(other == first for other in others)
    return first


def test_a_shard_that_is_missing_or_not_what_was_saved_is_refused_by_its_name(run):
    """Of the second of three torch would not notice that it is gone: sizes are those of the last."""
    found = found_by_ranks(run)
    for step, fault in ((2, "is missing"), (3, "bytes, state.json says"), (4, "has CRC-32")):
        said = found[str(step)]
        assert said.startswith(
            f"{run.checkpoint_side(step, 'trainer')}: the checkpoint is damaged: {SECOND} "
        )
        assert fault in said
        assert said.endswith(f"; remove {run.checkpoint(step)} to go on from checkpoint {step - 1}")
    assert found["5"] == found["1"] == ""


def test_a_failed_save_is_tried_again_once_and_leaves_nothing_in_the_way(run):
    """Though it failed on rank 0 alone, all ranks know at once: none waits for it in a barrier."""
    found = found_by_ranks(run)
    assert found["failed"] and found["request"] == Requests.RETRY
    assert found["again"] == "" and found["request afterwards"] == Requests.NONE
    assert run.complete_checkpoints() == [1, *CHANGES, 13, 20, 21]
    assert not run.checkpoint(14).exists() and not run.checkpoint(15).exists()
    assert found["twice"].startswith("checkpoint 15 was not written: ")
    assert found["metrics"] == {"checkpoint/failed": 3}


def test_moments_that_a_checkpoint_has_are_read_though_the_run_saves_weights_alone(run):
    """Zero moments beside a large count of updates would be trusted: the first steps would stand still."""
    assert found_by_ranks(run)["weights alone"] == {
        "updates": 7,
        "are read": True,
        "updates of weights alone": 0,
        "states": 0,
    }


def test_ranks_wait_for_each_other_in_every_group_as_long_as_in_the_whole(run):
    assert found_by_ranks(run)["timeouts"] == [TIMEOUT.total_seconds()]
