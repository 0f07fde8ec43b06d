"""Every binary and JSON format that is read: arbitrary bytes raise only DataError, and memory stays bounded."""

from __future__ import annotations

import copy
import json
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import read_json, read_jsonl, read_last_jsonl
from primerl_hpc.common.model_files import INDEX, tensor_files
from primerl_hpc.common.names import Role
from primerl_hpc.inference.checkpoint import read_headers
from primerl_hpc.inference.worker.mirror import Mirror
from primerl_hpc.observe.report.samples import pick_samples, sample_text
from primerl_hpc.orchestrator.checkpoint.follower import QUEUE, load_queue, load_state
from primerl_hpc.orchestrator.checkpoint.queue_file import read_queue, write_queue
from primerl_hpc.orchestrator.rollout_data import Group, Split
from primerl_hpc.orchestrator.rollouts.traces import keep_rows
from primerl_hpc.orchestrator.scoring.scoring import Scorer
from primerl_hpc.plan.plan import load_plan
from primerl_hpc.recipe.sft.rows import check_row
from primerl_hpc.recipe.sft.tables import parse_line
from primerl_hpc.run.records import Tail
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.rollouts.filesystem import IMAGES, read_rank, write_rank
from primerl_hpc.transport.rollouts.micro_batch import Picture, PlacedPicture, StepInfo
from primerl_hpc.transport.tensor_file import write_parts
from primerl_hpc.transport.weights import delta_codec
from primerl_hpc.transport.weights.delta import read_link
from primerl_hpc.transport.weights.delta_codec import apply, encode
from primerl_hpc.transport.weights.filesystem import MANIFEST, manifest_fault
from primerl_hpc.transport.weights.sources import DeltaChain
from tests.support.checksums import verify_checksums
from tests.support.helpers import make_plan, process_plan, random_row
from tests.unit.orchestrator.test_queue_file import Incarnation, make_recipe, make_rollout
from tests.unit.transport.test_weights_delta import write_full, write_link

MIB = 1 << 20
DEEP = "[" * 200_000

many = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
some = settings(many, max_examples=60)

# -- generators of damaged data --------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["", ".", "..", "/etc/passwd", "../x", "a\0b", "x", "\ud800", "x" * 300]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Return the path of every nested value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


@st.composite
def changed(draw: Callable, value: Any) -> Any:
    """Return a JSON value with a few parts removed or replaced."""
    made = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places(made))))
        if not path:
            return draw(VALUES)
        owner = made
        for key in path[:-1]:
            owner = owner[key]
        if draw(st.booleans()):
            owner[path[-1]] = draw(VALUES)
        else:
            del owner[path[-1]]
    return made


@st.composite
def damaged(draw: Callable, data: bytes) -> bytes:
    """Return the bytes with some changed, removed, repeated or inserted."""
    made = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(made)))
        end = min(len(made), start + draw(st.integers(0, 24)))
        made[start:end] = draw(
            st.one_of(st.binary(max_size=24), st.just(bytes(end - start)), st.just(b"\xff" * (end - start)))
        )
    return bytes(made)


def split_header(data: bytes) -> tuple[Any, bytes]:
    """Return the JSON header and the data of a safetensors file."""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


@st.composite
def damaged_tensors(draw: Callable, data: bytes) -> bytes:
    """Return a safetensors file with damaged bytes or another header. JSON in the header is changed as JSON."""
    if draw(st.booleans()):
        return draw(damaged(data))
    header, body = split_header(data)
    texts = [name for name, text in header.get("__metadata__", {}).items() if text[:1] in "[{"]
    if texts and draw(st.booleans()):
        name = draw(st.sampled_from(texts))
        header["__metadata__"][name] = json.dumps(draw(changed(json.loads(header["__metadata__"][name]))))
    else:
        header = draw(changed(header))
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def write_ascii(path: Path, value: Any) -> None:
    """Write JSON with surrogates as escapes, which any program can produce."""
    path.write_text(json.dumps(value))


@contextmanager
def only_data_errors() -> Iterator[None]:
    """Fail the test for any exception other than DataError."""
    try:
        yield
    except DataError:
        return


@contextmanager
def memory_at_most(size: int) -> Iterator[None]:
    """Limit the memory that Python and NumPy allocate in the block."""
    tracemalloc.start()
    try:
        with only_data_errors():
            yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= size, f"{peak / MIB:.0f} MiB"


# -- deltas ----------------------------------------------------------------------------------------

FILE_BYTES = 4 * MIB  # one piece
NOISE = np.random.default_rng(0).integers(0, 256, (2, 3000), np.uint8)


def made_up_delta(word_bytes: int, mask: bytes, values: bytes, size: int = FILE_BYTES) -> bytes:
    head = struct.pack("<4sBxxxQ", b"PDL1", word_bytes, size)
    return head + struct.pack("<II", len(mask), len(values)) + mask + values


def bomb(size: int) -> bytes:
    stream, zeros = zlib.compressobj(9), bytes(MIB)
    return b"".join([*(stream.compress(zeros) for _ in range(size // MIB)), stream.flush()])


@pytest.mark.parametrize("part", ["mask", "words"])
def test_a_delta_that_inflates_to_a_gibibyte_takes_no_more_memory_than_a_piece(part: str) -> None:
    big, mask = bomb(1 << 30), zlib.compress(bytes(FILE_BYTES // 16))
    assert len(big) < 1.1 * MIB
    delta = made_up_delta(2, big, b"") if part == "mask" else made_up_delta(2, mask, big)
    file = np.zeros(FILE_BYTES, np.uint8)
    with memory_at_most(8 * FILE_BYTES), pytest.raises(DataError, match="does not decompress to"):
        apply(file, delta)


@pytest.mark.parametrize("word_bytes", [0, 3, 5, 16, 255])
def test_a_delta_with_an_unsupported_word_size_is_refused(word_bytes: int) -> None:
    file = np.zeros(64, np.uint8)
    mask = zlib.compress(b"\xff" * 8)
    with pytest.raises(DataError, match=f"words of {word_bytes} bytes"):
        apply(file, made_up_delta(word_bytes, mask, zlib.compress(bytes(64)), 64))


@many
@given(data=damaged(encode(NOISE[0], NOISE[1], word_bytes=2)))
def test_a_damaged_delta_is_applied_or_refused(data: bytes) -> None:
    with only_data_errors():
        apply(NOISE[0].copy(), data)


@settings(deadline=None)
@given(size=st.integers(0, 3000), word_bytes=st.sampled_from([1, 2, 4, 8]))
def test_no_delta_exceeds_max_delta_bytes(size: int, word_bytes: int) -> None:
    delta = encode(NOISE[0][:size], NOISE[1][:size], word_bytes=word_bytes)
    assert len(delta) <= delta_codec.max_delta_bytes(size)


def link_of(folder: Path) -> Path:
    """Write a chain of one full version and one link. Returns the folder of the link."""
    run = RunDir(folder)
    write_full(run, 1)
    write_link(run, 2)
    return run.delta_step(2)


@some
@given(data=st.data())
def test_a_damaged_links_manifest_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    link = link_of(tmp_path_factory.mktemp("link"))
    whole = link.parents[1] / "weights" / "step_1"
    target = data.draw(st.sampled_from([link, whole]))
    write_ascii(target / MANIFEST, data.draw(changed(read_json(target / MANIFEST))))
    with only_data_errors():
        read_link(link)
    with only_data_errors():
        manifest_fault(whole)
    with only_data_errors():
        verify_checksums(whole)
    scratch = tmp_path_factory.mktemp("scratch")
    with only_data_errors():
        Mirror(scratch).update_to(DeltaChain(str(whole), 1, ((2, str(link)),)), 2)


def test_a_delta_file_larger_than_its_shard_allows_is_not_read(tmp_path: Path) -> None:
    link = link_of(tmp_path)
    manifest = read_json(link / MANIFEST)
    entry = manifest["files"][0]
    with (link / entry["name"]).open("r+b") as file:
        file.truncate(1 << 30)  # a sparse file: it takes no disk space
    write_ascii(link / MANIFEST, manifest | {"files": [entry | {"size_bytes": 1 << 30}]})
    with memory_at_most(MIB), pytest.raises(DataError, match="a delta of this shard has at most"):
        read_link(link)


# -- tensor files ----------------------------------------------------------------------------------


def rank_files(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    rows = [random_row(rng, [6, 4]), random_row(rng, [9])]
    picture = Picture("a1", np.ones((4, 6), np.float32), (1, 2, 2))
    rows[0].images = (PlacedPicture(picture, 1, 2),)
    rows[1].routed_experts = np.ones((9, 2, 2), np.uint8)
    write_parts(folder / IMAGES, {"a1": [picture.pixels]}, {})
    write_rank(folder / "rank_0.safetensors", StepInfo(3, ["a"]), rows, world_size=1)
    return folder / "rank_0.safetensors"


@pytest.fixture(scope="module")
def rank_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rank_files(tmp_path_factory.mktemp("rank"))


@many
@given(data=st.data())
def test_damaged_rollouts_are_read_or_refused(rank_file: Path, data: st.DataObject) -> None:
    rank_files(rank_file.parent)
    path = data.draw(st.sampled_from([rank_file, rank_file.with_name(IMAGES)]))
    path.write_bytes(data.draw(damaged_tensors(path.read_bytes())))
    with only_data_errors():
        _, rows, _ = read_rank(rank_file)
        for row in rows:
            assert len(row.position_ids) == len(row.sample_ids) == len(row.weights("rl")) == row.num_tokens
            for placed in row.images:
                assert placed.picture.pixels.sum() is not None


def queue_of(folder: Path) -> Path:
    rng, scorer, groups = np.random.default_rng(1), Scorer(make_recipe("opd")), []
    for number in range(2):
        group = Group(number, Split.TRAIN, 0, number, 2, to_start=0, retries_left=0)
        group.results, group.versions = [make_rollout(float(rng.random()), rng) for _ in range(2)], [0, 1]
        groups.append(scorer.score(group))
    sample = groups[0].rollouts[0].samples[0]
    sample.images = (PlacedPicture(Picture("a1", np.ones((4, 6), np.float32), (1, 2, 2)), 0, 1),)
    sample.routed_experts = [np.ones((sample.num_tokens, 2, 2), np.uint16)]
    write_queue(folder / QUEUE, groups)
    return folder / QUEUE


@many
@given(data=st.data())
def test_a_damaged_queue_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = queue_of(tmp_path_factory.mktemp("queue"))
    path.write_bytes(data.draw(damaged_tensors(path.read_bytes())))
    with only_data_errors():
        read_queue(path)


@many
@given(data=st.data())
def test_a_damaged_model_folder_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("model")
    write_parts(
        folder / "model.safetensors", {"a": [np.ones((3, 2), np.float32)], "b": [np.ones(5, np.uint8)]}, {}
    )
    write_ascii(folder / INDEX, {"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}})
    path = folder / "model.safetensors"
    if data.draw(st.booleans()):
        path.write_bytes(data.draw(damaged_tensors(path.read_bytes())))
    else:
        write_ascii(folder / INDEX, data.draw(changed(read_json(folder / INDEX))))
    for read in (read_headers, tensor_files):
        with only_data_errors():
            read(folder)


@pytest.mark.parametrize("size", [2**62, 2**40, 99_999_999])
def test_a_header_length_beyond_the_file_allocates_no_memory(tmp_path: Path, size: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", size) + b"{}")
    with memory_at_most(MIB), pytest.raises(DataError, match="header is truncated"):
        read_headers(tmp_path)


# -- checkpoint state ------------------------------------------------------------------------------


@some
@given(data=st.data())
def test_a_damaged_state_of_the_orchestrator_is_restored_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    run = RunDir(tmp_path_factory.mktemp("run"))
    path = run.checkpoint_side(1, "orchestrator") / "state.json"
    state = {
        "version": 3,
        "step": 1,
        "queue_crc32": None,
        **json.loads(json.dumps(Incarnation(run, make_recipe()).state.snapshot())),
    }
    path.parent.mkdir(parents=True)
    write_ascii(path, data.draw(changed(state)))
    with only_data_errors():
        load_queue(run, 1, load_state(run, 1))
    with only_data_errors():
        Incarnation(run, make_recipe(), 1)  # restores


@some
@given(data=st.data())
def test_a_damaged_state_of_the_trainer_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    checkpoint = pytest.importorskip("primerl_hpc.trainer.checkpoint.checkpoint")
    side = tmp_path_factory.mktemp("side")
    entry = {"name": "shard-1.safetensors", "size_bytes": 3, "crc32": 5}
    state = {"schema_version": checkpoint.SCHEMA_VERSION, "num_tokens": 1, "schedule_start": 0, "lora": None}
    state |= {"optimizer": "adamw", "optimizer_kinds": ["exp_avg"], "optimizer_updates": 1, "progress": {}}
    write_ascii(side / "state.json", data.draw(changed(state | {"shards": [entry]})))
    with only_data_errors():
        checkpoint.read_state(side)


@some
@given(data=st.data())
def test_a_damaged_plan_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    run = RunDir(tmp_path_factory.mktemp("run"))
    processes = [process_plan(Role.TRAINER), process_plan(Role.INFERENCE)]
    make_plan(run.root, make_recipe(), processes=processes)
    write_ascii(run.plan, data.draw(changed(read_json(run.plan))))
    with only_data_errors():
        load_plan(run)


# -- JSON and JSON lines
# -----------------------------------------------------------------------------------------------------


@pytest.fixture
def deep_rows(tmp_path: Path) -> RunDir:
    """A run whose traces have a line of 200,000 brackets between two valid lines."""
    run = RunDir(tmp_path)
    run.traces("train").parent.mkdir(parents=True)
    good = [json.dumps({"env": "a", "reward": reward, "version": 1, "prompt": "p"}) for reward in (0.0, 1.0)]
    run.traces("train").write_text("\n".join([good[0], DEEP, '{"a": ' * 100_000, good[1]]) + "\n")
    return run


def test_deeply_nested_brackets_count_as_a_torn_line(deep_rows: RunDir) -> None:
    path = deep_rows.traces("train")
    assert [row["reward"] for row in read_jsonl(path)] == [0.0, 1.0]
    assert [row["reward"] for row in read_last_jsonl(path, 10)] == [0.0, 1.0]
    assert [row["reward"] for row in Tail(path).read()] == [0.0, 1.0]
    assert len(pick_samples(deep_rows, 10, split="train")) == 2
    keep_rows(path, lambda row: row["reward"] > 0)
    assert [row["reward"] for row in read_jsonl(path)] == [1.0]


def test_a_deeply_nested_file_or_row_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text(DEEP + "]" * 200_000)
    with pytest.raises(DataError, match=r"deep\.json: not valid JSON \(nested too deeply\)"):
        read_json(tmp_path / "deep.json")
    with pytest.raises(DataError, match=r"rows\.jsonl:7: not valid JSON"):
        parse_line("rows.jsonl:7", DEEP.encode())
    row = parse_line("rows.jsonl:7", json.dumps({"prompt": "p", "completion": "c", "tools": DEEP}).encode())
    with pytest.raises(DataError, match=r"rows\.jsonl:7: column 'tools'"):
        check_row(row)


def test_an_endless_line_uses_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.write(b'{"a": 1}\n')
        file.seek(400 * MIB, 1)
        file.write(b'\n{"a": 2}\n')
    with memory_at_most(330 * MIB):
        assert [row["a"] for row in read_jsonl(path)] == [1, 2]
    with memory_at_most(330 * MIB):
        assert [row["a"] for row in read_last_jsonl(path, 5)] == [2]


@many
@given(
    rows=st.lists(
        st.one_of(
            VALUES,
            changed(
                {
                    "env": "a",
                    "reward": 0.5,
                    "version": 1,
                    "last_version": 2,
                    "advantage": 0.1,
                    "output_tokens": 3,
                    "turns": 1,
                    "prompt": "p",
                    "completion": "c",
                    "messages": [
                        {"role": "user", "chars": 1},
                        {"role": "assistant", "chars": 1, "tool_calls": [{"name": "n", "arguments": "{}"}]},
                    ],
                }
            ),
        ),
        max_size=4,
    ),
    tail=st.binary(max_size=40),
)
@example(rows=[{"env": 1, "reward": "a"}, {"reward": None}], tail=b"\xff\xfe")
def test_arbitrary_traces_are_shown_or_skipped(
    tmp_path_factory: pytest.TempPathFactory, rows: list, tail: bytes
) -> None:
    run = RunDir(tmp_path_factory.mktemp("traces"))
    run.traces("train").parent.mkdir(parents=True)
    good = {"env": "a", "reward": 0.5, "version": 1}
    lines = [json.dumps(row).encode() for row in [*rows, good]]
    run.traces("train").write_bytes(b"\n".join([*lines, tail]))
    for order in ("last", "best", "worst"):
        sample_text(pick_samples(run, 3, split="train", order=order), is_full=True)
