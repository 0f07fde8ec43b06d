"""Process groups: a stranger who connects in the place of a rank reads nothing, runs nothing and becomes no peer."""

from __future__ import annotations

import ast
import multiprocessing
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

import primerl_hpc
from primerl_hpc.run.access.keys import RunKeys, run_keys
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.trainer.setup import all_gather_bytes, broadcast_from_rank0, gather_to_rank0
from primerl_hpc.transport.store import SecureStore, serve_store

PACKAGE = Path(primerl_hpc.__file__).parent
PICKLES = {"pickle", "cloudpickle", "dill", "shelve", "allow_pickle"}
"""Modules and arguments that read objects which may contain code."""


def test_no_module_of_the_package_exchanges_or_reads_pickles() -> None:
    """torch's collectives of objects unpickle what a peer sends, and so does torch.load."""
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, line in names_in(path)
        if name in PICKLES or name.endswith(("_object_list", "gather_object")) or name == "torch.load"
    ]
    assert not found


def names_in(path: Path) -> list[tuple[str, int]]:
    """Return imported modules, attributes, names and keyword arguments of a file, with their lines."""
    names: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [(alias.name.split(".")[0], node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [((node.module or "").split(".")[0], node.lineno)]
            names += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names += [(node.attr, node.lineno), (ast.unparse(node), node.lineno)]
        elif isinstance(node, ast.Name):
            names.append((node.id, node.lineno))
        elif isinstance(node, ast.keyword) and node.arg and not _is_false(node.value):
            names.append((node.arg, node.value.lineno))
    return names


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


# -- values between ranks --------------------------------------------------------------------------


def exchange_values(rank: int, keys: RunKeys, address: tuple[str, int]) -> None:
    store = SecureStore(keys, *address, timeout_s=20)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    is_leader, count = rank == 0, store.num_keys()
    for number in range(3):
        assert broadcast_from_rank0((number, {"loss": 1.5}) if is_leader else None) == [number, {"loss": 1.5}]
        assert gather_to_rank0({"rank": rank}) == ([{"rank": 0}, {"rank": 1}] if is_leader else [])
        assert all_gather_bytes(b"x" * rank * number) == [b"", b"x" * number]
    dist.barrier()
    assert store.num_keys() == count, "values stay in the store after they were read"
    dist.barrier()
    dist.destroy_process_group()


def test_values_of_ranks_are_exchanged_as_json_and_leave_nothing_in_the_store(tmp_path: Path) -> None:
    keys = run_keys(RunDir(tmp_path))
    store = serve_store(keys, "ranks", "127.0.0.1")
    assert store.server is not None
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=exchange_values, args=(rank, keys, store.server.address)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    store.server.close()
