"""Operations on the run directory at a start and while nothing happens, counted by strace.

tools/bench/footprint.py measures more, tools/bench/start_operations.py the starts of all processes of a real run.
"""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.support.helpers import ROOT

sys.path.insert(0, str(ROOT / "tools" / "bench"))

from footprint import CHILDREN, measure

BUDGET_PER_S = 2.0
START_BUDGET = 180
"""And `BUDGET_PER_S` for the time that the start takes: about 10 s and 157 operations on a quiet machine."""
WATCHERS = ("supervisor", "orchestrator", "engine_host")
ENGINES = 64
"""So many that one more operation for each of them at a start of 10 s would exceed the budget."""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_start_and_idle_time_of_watchers_keep_to_their_budgets_with_many_processes() -> None:
    idle = partial(measure, checkout=ROOT, engines=ENGINES, seconds=20.0, settle_s=16.0)
    with ThreadPoolExecutor() as pool:
        found = pool.map(idle, [CHILDREN[watcher] for watcher in WATCHERS])
        rows = dict(zip(WATCHERS, found, strict=True))
    assert all(0 < row["operations_per_s"] <= BUDGET_PER_S for row in rows.values()), rows
    starts = [rows[watcher] for watcher in ("supervisor", "engine_host")]
    for row in starts:
        assert 0 < row["start_operations"] <= START_BUDGET + BUDGET_PER_S * row["start_s"], starts
