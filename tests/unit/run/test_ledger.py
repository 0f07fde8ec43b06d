"""Ledger files: many writers lose no row, a broken line costs only itself; and which metric measures which figure."""

from __future__ import annotations

import multiprocessing
import stat
from pathlib import Path

import pytest

from primerl_hpc.common.files import append_json
from primerl_hpc.observe.metric_catalog import is_known
from primerl_hpc.run.ledger.measures import MEASURES, compare, metric_rows, steady_rows
from primerl_hpc.run.ledger.rows import LedgerRow, parse_ledger_row
from primerl_hpc.run.ledger.store import append_rows, read_rows, user_ledger
from primerl_hpc.run.rundir import RunDir

FIGURE = {"value": 10.0, "low": 8.0, "high": 12.0}


def row(**changes: object) -> LedgerRow:
    values = {"figure": "time.step", "measured": 11.0, "predicted": 10.0, "unit": "s", "gpu": "H100-SXM"}
    return LedgerRow(**(values | changes))  # type: ignore[arg-type]


def refuse(message: str) -> None:
    raise AssertionError(message)


def _append_many(path: Path, writer: int) -> None:
    for index in range(25):
        append_rows(path, [row(run=f"{writer}-{index}", layout="x" * 3000), row(run=f"{writer}-{index}b")])


def test_concurrent_writers_lose_no_row(tmp_path: Path) -> None:
    path = tmp_path / "home" / "ledger.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append_many, args=(path, writer)) for writer in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    runs = [found.run for found in read_rows(path, warn=refuse)]
    assert len(runs) == len(set(runs)) == 4 * 50
    # the two rows of one call stay together
    assert all(runs[at + 1] == f"{runs[at]}b" for at in range(0, len(runs), 2))


def test_a_broken_line_is_skipped_with_a_warning_and_stays_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    append_rows(path, [row(run="first")])
    with path.open("a") as file:
        file.write(
            '{"figure": "time.step", "measured": "fast", "gpu": "x"}\nnot json\n{"figure": "cut by a kil'
        )
    append_rows(path, [row(run="second")])
    warnings: list[str] = []
    assert [found.run for found in read_rows(path, warn=warnings.append)] == ["first", "second"]
    assert warnings == [f"{path}:2: not a row of a ledger; skipped line 2 and 2 more"]
    assert "cut by a kil\n" in path.read_text()


def test_a_missing_ledger_has_no_rows_and_no_rows_write_no_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    assert read_rows(path, warn=refuse) == []
    assert append_rows(path, []) == 0 and not path.exists()


def test_the_users_ledger_is_in_the_state_home_and_is_not_created_by_asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIMERL_HOME", str(tmp_path / "home"))
    assert user_ledger() == tmp_path / "home" / "ledger.jsonl"
    assert not user_ledger().parent.exists()


def test_a_ledger_that_cannot_be_written_is_an_error_of_the_caller(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").mkdir()
    with pytest.raises(OSError):
        append_rows(tmp_path / "ledger.jsonl", [row()])


def test_a_row_survives_its_own_json_and_ignores_keys_of_newer_versions() -> None:
    original = row(software={"torch": "2.9.1"}, family="qwen3", attempt=2, source="calibrate")
    assert parse_ledger_row({**original.as_json(), "color": "red"}) == original


@pytest.mark.parametrize(
    "changes",
    [
        {"figure": ""},
        {"gpu": None},
        {"measured": None},
        {"measured": float("nan")},
        {"measured": True},
        {"predicted": "10"},
        {"time": float("inf")},
        {"software": {"torch": 2.9}},
        {"software": []},
    ],
)
def test_a_row_with_a_wrong_value_is_refused(changes: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        parse_ledger_row({**row().as_json(), **changes})


def test_every_measure_reads_metrics_of_the_catalog() -> None:
    asked: dict[str, set[str]] = {"trainer": set(), "orchestrator": set()}

    class Recorder(dict):
        def __init__(self, file: str) -> None:
            self.file = file

        def get(self, name: str, default: object = None) -> float:
            asked[self.file].add(name)
            return 0.05

    for measure in MEASURES:
        assert measure.value(Recorder(measure.file)) is not None
    assert len({measure.figure for measure in MEASURES}) == len(MEASURES)
    for file, names in asked.items():
        assert names and all(is_known(name, file) for name in names)  # type: ignore[arg-type]


def test_the_first_step_of_each_attempt_is_left_out(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for attempt, step, seconds in ((1, 1, 90.0), (1, 2, 11.0), (2, 3, 70.0), (2, 4, 13.0), (2, 5, 15.0)):
        line = {"step": step, "attempt": attempt, "time/step": seconds, "time/wait_for_batch": seconds / 2}
        append_json(run.metrics("trainer"), line)
    rows = metric_rows(run)
    assert [found["step"] for found in steady_rows(rows["trainer"])] == [2, 4, 5]
    step, waits = compare({"time.step": FIGURE, "idle.trainer": {**FIGURE, "value": 0.4}}, rows)
    assert (step.measured, step.ratio, step.is_inside) == (13.0, 1.3, False)
    assert waits.measured == 0.5
    assert compare({"time.step": FIGURE}, metric_rows(run, attempt=1))[0].measured == 11.0


def test_figures_without_a_measurement_and_measurements_without_a_figure_are_not_compared() -> None:
    rows = {"trainer": [{"step": 1, "attempt": 1, "time/step": 5.0, "perf/throughput": float("nan")}]}
    assert compare({}, rows) == ()
    assert compare({"rate.tokens": FIGURE, "memory.trainer.reserved": FIGURE}, rows) == ()
    assert compare({"time.step": FIGURE}, {}) == ()


def test_other_users_may_not_write_to_the_ledger(tmp_path: Path) -> None:
    append_rows(tmp_path / "ledger.jsonl", [row()])
    assert stat.S_IMODE((tmp_path / "ledger.jsonl").stat().st_mode) & 0o022 == 0
