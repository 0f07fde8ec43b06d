"""Each row gets one number, over attempts, interrupted batches, lost rows and rewinds."""

from __future__ import annotations

from pathlib import Path

from primerl_hpc.common.files import append_json
from primerl_hpc.recipe.schema.run import LogExtras
from primerl_hpc.run.metrics import MetricsWriter
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.tracking.base import Item, MetricRow, SampleTable
from primerl_hpc.tracking.stream import Stream

SOURCES = ("trainer", "orchestrator")


def write(run: RunDir, *steps: int) -> None:
    for step in steps:
        for source in SOURCES:
            MetricsWriter(run.metrics(source)).write(step, {"x": 1.0, "bad": float("nan"), "text": "a"})


def send(stream: Stream, count: int = 100, **options: bool) -> list[Item]:
    sent: list[Item] = []
    for item in stream.pending(**options):
        if len(sent) == count:
            break  # the connection is lost
        stream.commit(item)
        sent.append(item)
    return sent


def described(items: list[Item]) -> list[tuple[int, str, int]]:
    return [
        (item.number, item.source if isinstance(item, MetricRow) else "table", item.step) for item in items
    ]


def test_an_interrupted_batch_continues_with_the_same_numbers_in_the_next_attempt(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write(run, 1, 2)
    first = send(Stream(run, "t", SOURCES, None), count=1)
    write(run, 3)
    later = Stream(run, "t", SOURCES, None)
    later.restore(None)
    assert not later.is_complete
    rest = send(later)
    assert described([*first, *rest]) == [
        (0, "trainer", 1),
        (1, "trainer", 2),
        (2, "orchestrator", 1),
        (3, "orchestrator", 2),
        (4, "trainer", 3),
        (5, "orchestrator", 3),
    ]
    assert later.is_complete
    row = rest[0]
    assert isinstance(row, MetricRow) and row.values.keys() == {
        f"trainer/{key}" for key in ("step", "time", "attempt", "x")
    }
    again = Stream(run, "t", SOURCES, None)
    again.restore(None)
    assert send(again) == []


def test_rows_that_were_lost_behind_the_target_are_sent_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write(run, 1, 2)
    everything = send(Stream(run, "t", SOURCES, None))
    later = Stream(run, "t", SOURCES, None)
    later.restore(2)  # the target has items 0 and 1
    assert described(send(later)) == described(everything)[2:]
    write(run, 3)
    assert [item.number for item in send(later)] == [4, 5]


def test_tables_have_the_rollouts_of_complete_batches_at_the_interval(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    stream = Stream(run, "t", SOURCES, LogExtras(interval=2, sample_ratio=0.5))
    for step in (1, 2, 3, 4):
        for index in range(4):
            row = {
                "env": "nim",
                "task": str(index),
                "step": step,
                "reward": index,
                "advantage": -0.5,
                "entropy": 0.1,
            }
            append_json(
                run.traces("train"), {**row, "prompt": "p" * 30_000, "completion": "c", "output_tokens": 3}
            )
        append_json(run.traces("train"), {"env": "nim", "task": "x", "version": 0, "error": "lost"})
        write(run, step)
        tables = [item for item in send(stream) if isinstance(item, SampleTable)]
        assert [table.step for table in tables] == ([2] if step == 3 else [])
        for table in tables:
            assert len(table.rows) == 2 and table.distributions["reward"] == [0, 1, 2, 3]
            assert table.distributions.keys() == {"reward", "advantage", "entropy", "completion_tokens"}
            assert len(table.rows[0]["prompt"]) < 21_000 and table.rows[0]["environment"] == "nim"
    last = [item.step for item in send(stream, is_last=True) if isinstance(item, SampleTable)]
    assert last == [4]
    assert not [item for item in send(stream, is_last=True)]


def test_after_a_rewind_only_new_rows_are_sent(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write(run, 1, 2, 3)
    stream = Stream(run, "t", SOURCES, None)
    assert len(send(stream, count=4)) == 4  # the trainer's rows and one of the orchestrator
    halfway = Stream(run, "t", SOURCES, None)
    halfway.restore(None)
    offsets = halfway.sent_offsets()
    first = run.metrics("orchestrator").read_bytes().index(b"\n") + 1
    assert offsets == {"trainer": run.metrics("trainer").stat().st_size, "orchestrator": first}
    halfway.rewind(offsets, 1)
    later = Stream(run, "t", SOURCES, None)
    later.restore(None)
    assert described(send(later)) == [(4, "orchestrator", 2), (5, "orchestrator", 3)]
