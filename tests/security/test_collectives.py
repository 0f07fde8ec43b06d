"""Process groups: a stranger who connects in the place of a rank reads nothing, runs nothing and becomes no peer."""

from __future__ import annotations

import ast
import multiprocessing
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

import primerl_hpc  # noqa: E402
from primerl_hpc.common.node.exiting import exit_process  # noqa: E402
from primerl_hpc.run.access.keys import RunKeys, run_keys  # noqa: E402
from primerl_hpc.run.rundir import RunDir  # noqa: E402
from primerl_hpc.trainer.setup import all_gather_bytes, broadcast_from_rank0, gather_to_rank0  # noqa: E402
from primerl_hpc.transport import members  # noqa: E402
from primerl_hpc.transport.store import SecureStore, serve_store  # noqa: E402
from primerl_hpc.transport.weights.broadcast_group import BroadcastGroup  # noqa: E402
from tests.support.group_starts import OWNER, GroupStart  # noqa: E402
from tests.support.stranger import NOBODY, Command  # noqa: E402

LIMIT_S = 30.0
MOST_ATTACKS = 8
"""Tries until the thief connects before the true rank, which depends on what else the machine does."""
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


@cache
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
    store = SecureStore(keys, *address, timeout_s=LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.barrier()  # torch has deleted its own keys
    is_leader, count = rank == 0, store.num_keys()
    dist.barrier()
    for number in range(3):
        assert broadcast_from_rank0((number, {"loss": 1.5}) if is_leader else None) == [number, {"loss": 1.5}]
        assert gather_to_rank0({"rank": rank}) == ([{"rank": 0}, {"rank": 1}] if is_leader else [])
        assert all_gather_bytes(b"x" * rank * number) == [b"", b"x" * number]
    dist.barrier()
    assert store.num_keys() == count, "values stay in the store after they were read"
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(function: Callable[..., None], num_ranks: int, folder: Path) -> None:
    """Run ``function(rank, keys, address)`` on forked ranks; ``address``: of their store."""
    keys = run_keys(RunDir(folder))
    store = serve_store(keys, "ranks", "127.0.0.1")
    assert store.server is not None
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=function, args=(rank, keys, store.server.address)) for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    store.server.close()
    assert [process.exitcode for process in ranks] == [0] * num_ranks


def test_values_of_ranks_are_exchanged_as_json_and_leave_nothing_in_the_store(tmp_path: Path) -> None:
    run_ranks(exchange_values, 2, tmp_path)


# -- who becomes a peer ----------------------------------------------------------------------------


def test_every_group_of_the_package_proves_its_members() -> None:
    """A module that forms a group of several ranks first calls `require_proofs`."""
    forming = {"init_process_group", "ProcessGroupGloo"}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if forming & {name for name, _ in names_in(path)} and "world_size=1" not in text:
            assert "require_proofs()" in text, f"{path.relative_to(PACKAGE)} forms a group without proofs"


def form_groups(rank: int, keys: RunKeys, address: tuple[str, int]) -> None:
    """Form a group with each function through which trainers and engines form them, and count the proofs."""
    from vllm.distributed.utils import init_gloo_process_group

    members.require_proofs()
    prove, proven = members.prove_peers, []

    def counted(group: Any, *arguments: Any) -> str:
        proven.append(group)
        return prove(group, *arguments)

    members.prove_peers = counted
    store, minute = SecureStore(keys, *address, timeout_s=LIMIT_S), timedelta(minutes=1)
    forms: list[Callable[[], object]] = [
        lambda: dist.init_process_group("gloo", store=store, rank=rank, world_size=4),
        lambda: dist.new_group(backend="gloo"),
        lambda: init_device_mesh("cpu", (2, 2)),
        lambda: init_gloo_process_group(dist.PrefixStore("vllm", store), rank, 4, minute),
        lambda: BroadcastGroup.join(store, "weights", rank=rank, size=4, device=torch.device("cpu")),
    ]
    for number, form in enumerate(forms, start=1):
        form()
        assert len(proven) >= number, f"function {number} forms a group without proofs"
    exit_process()  # groups without a name cannot be destroyed


def test_every_function_that_forms_gloo_groups_calls_the_protected_constructor(
    tmp_path: Path, loopback: None
) -> None:
    pytest.importorskip("vllm.distributed.utils")
    run_ranks(form_groups, 4, tmp_path)


KEY = b"key of the group"


def connected_pair(store: dist.Store, rank: int) -> Any:
    return members._connect(store, rank, 2, timedelta(seconds=LIMIT_S), members.listen())


def prove_to(peer: Callable[[Any], None], limit_s: float = LIMIT_S) -> str:
    """Return what rank 0 finds about rank 1, which does ``peer(group)`` instead of proving its membership."""
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(connected_pair, store, 1)
        group, other = connected_pair(store, 0), future.result()
        acting = pool.submit(peer, other)
        found = members.prove_peers(group, KEY, 1, limit_s)
        acting.result()
    return found


def answer(group: Any, data: bytes) -> None:
    sent = group.send([torch.frombuffer(bytearray(data), dtype=torch.uint8)], 0, 0)
    received = torch.zeros(members.PROOF_BYTES, dtype=torch.uint8)
    group.recv([received], 0, 0).wait()
    sent.wait()


def reflect(group: Any) -> None:
    received = torch.zeros(members.PROOF_BYTES, dtype=torch.uint8)
    group.recv([received], 0, 0).wait()
    group.send([received], 0, 0).wait()


STRANGER = "another process is connected to rank 0 in the place of rank 1"


@pytest.mark.parametrize(
    ("peer", "found"),
    [
        (lambda group: answer(group, members.proof(KEY, 2, 0, 1, 0)), ""),
        (lambda group: answer(group, members.proof(b"key of another group", 2, 0, 1, 0)), STRANGER),
        (lambda group: answer(group, members.proof(KEY, 3, 0, 1, 0)), STRANGER),
        (lambda group: answer(group, members.proof(KEY, 2, 1, 1, 0)), STRANGER),
        (reflect, STRANGER),
    ],
    ids=["member", "other_group", "other_size", "other_connection", "reflected"],
)
def test_only_the_proof_of_this_peer_of_this_group_is_accepted(
    peer: Callable[[Any], None], found: str, loopback: None
) -> None:
    assert prove_to(peer) == found


def test_a_silent_peer_is_found_within_the_time_limit(loopback: None) -> None:
    assert (
        prove_to(lambda _: None, limit_s=0.2) == "rank 1 sent rank 0 no proof that it is a member of the run"
    )


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture(scope="module")
def thief(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program of another user, see tests/support/gloo_thief.c."""
    if os.geteuid() != 0 or shutil.which("cc") is None:
        pytest.skip("needs root, to act as other users, and a C compiler")
    program = tmp_path_factory.mktemp("thief") / "gloo_thief"
    source = Path(__file__).parents[1] / "support" / "gloo_thief.c"
    subprocess.run(["cc", "-O2", "-pthread", "-o", str(program), str(source)], check=True)
    return program


@dataclass
class Attack:
    starts: list[list[tuple[str, int]]]
    """Outcome and number of failed tries, for each start and rank."""
    num_accepted: int
    """Connections of the thief that gloo took for a rank."""
    has_run_code: bool

    @property
    def outcomes(self) -> set[str]:
        return {outcome for start in self.starts for outcome, _ in start}

    @property
    def failures(self) -> list[int]:
        """Return the number of failed tries of each start."""
        return [max(failures for _, failures in start) for start in self.starts]


def attack(
    program: Path, folder: Path, numbers: tuple[int, int], start: GroupStart, num_starts: int
) -> Attack:
    """Form groups while the thief connects. ``numbers``: the sequence numbers that it sends, see its arguments."""
    mark, pickled = folder / "ran", folder / "pickle"
    data = pickle.dumps(Command(mark))
    pickled.write_bytes(data + b"." * (-len(data) % 8))
    folder.chmod(0o777)
    keys = run_keys(RunDir(folder))
    with program.open("rb") as executable, pickled.open("rb") as content:
        paths = [f"/proc/self/fd/{file.fileno()}" for file in (executable, content)]
        thief = subprocess.Popen(
            [paths[0], str(OWNER), "600", paths[1], *map(str, numbers)],
            stdout=subprocess.PIPE,
            text=True,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            pass_fds=[executable.fileno(), content.fileno()],
        )
    with thief:
        assert thief.stdout is not None
        assert thief.stdout.readline() == "watching\n"
        try:
            starts = [start.run(keys) for _ in range(num_starts)]
        finally:
            thief.terminate()
        return Attack(starts, len(thief.stdout.readlines()), mark.exists())


def test_a_stranger_who_takes_the_place_of_a_rank_is_found_and_the_run_ends_with_a_sentence(
    thief: Path, tmp_path: Path
) -> None:
    """The thief knows all sequence numbers, because listeners start at the first one."""
    for number in range(MOST_ATTACKS):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = attack(thief, folder, (0, 6), GroupStart(max_skipped=1, proof_s=0.5), num_starts=1)
        assert not found.has_run_code
        if found.num_accepted:
            break
    assert found.num_accepted, "the thief was not fast enough to show anything"
    assert not found.has_run_code
    for outcome in found.outcomes:
        # where it loses a race, the next try succeeds
        assert outcome == "done" or "another user of this node or network may have connected" in outcome
    assert found.failures[0] >= 1


def test_groups_form_although_a_stranger_guesses_sequence_numbers(thief: Path, tmp_path: Path) -> None:
    found = attack(thief, tmp_path, (-members.MAX_SKIPPED, 200), GroupStart(), num_starts=2)
    assert found.outcomes == {"done"}
    assert not found.has_run_code


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_no_start_of_many_runs_code_or_continues_with_a_stranger(
    thief: Path, tmp_path: Path, num_ranks: int
) -> None:
    start = GroupStart(num_ranks=num_ranks)
    found = attack(thief, tmp_path, (-members.MAX_SKIPPED, 200), start, num_starts=20)
    print(f"{num_ranks} ranks: failed tries of each start {found.failures}, {found.num_accepted} accepted")
    assert not found.has_run_code
    assert {outcome.split(":")[0] for outcome in found.outcomes} <= {"done", "RoleError"}
