#!/usr/bin/env python3
"""Compare the cost of parsing our lines of vLLM's /metrics with that of parsing all lines, both by prometheus_client.

    tools/bench/metrics_parser.py --json

The orchestrator reads the metrics of every engine each 2 s (`load_monitor.POLL_S`) on its event loop. The text has
vLLM's families: 19 histograms with 20 buckets and 20 counters and gauges, each for one engine. The figure is the ratio
of CPU times of the two in one process; both find the same values. docs/decisions/0015-layout.md uses it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from machine import show  # noqa: E402
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

from primerl_hpc.orchestrator.engines.fleet import METRICS, parse_metrics  # noqa: E402
from primerl_hpc.orchestrator.engines.load_monitor import POLL_S  # noqa: E402

NUM_HISTOGRAMS, NUM_BUCKETS, NUM_GAUGES = 19, 20, 14
LABELS = {"engine": "0", "model_name": "policy"}


def metrics_text() -> str:
    """Return metrics of one engine in Prometheus' text format."""
    registry = CollectorRegistry()
    for number, name in enumerate(name for name in METRICS if name.startswith("vllm:")):
        kind = Counter if name.endswith("_total") else Gauge
        metric = kind(
            name.removesuffix("_total"), "Metric of the run.", list(LABELS), registry=registry
        ).labels(**LABELS)
        metric.inc(number + 0.25)
    for number in range(NUM_GAUGES):
        Gauge(f"vllm:gauge_{number}", "A gauge.", list(LABELS), registry=registry).labels(**LABELS).set(
            number
        )
    buckets = [1.5**power for power in range(NUM_BUCKETS - 1)]
    for number in range(NUM_HISTOGRAMS):
        name = f"vllm:histogram_{number}_seconds"
        histogram = Histogram(name, "A histogram.", list(LABELS), buckets=buckets, registry=registry)
        for value in range(100):
            histogram.labels(**LABELS).observe(value / 10)
    return generate_latest(registry).decode()


def parse_all(text: str) -> dict[str, float]:
    """Return what `parse_metrics` returns, for one engine, by parsing all lines."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if (name := METRICS.get(sample.name)) is not None:
                found[name] = found.get(name, 0.0) + sample.value
    return found


def cpu_ms(parse: Callable[[str], dict[str, float]], text: str, repeats: int) -> float:
    """Return the median CPU time of one call in ms."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        parse(text)
        times.append(1000 * (time.process_time() - start))
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=51)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    text = metrics_text()
    assert parse_metrics(text) == parse_all(text), "the results differ"
    ours_ms, all_ms = (cpu_ms(parse, text, options.repeats) for parse in (parse_metrics, parse_all))
    row = {
        "lines": len(text.splitlines()),
        "our lines, ms": ours_ms,
        "all lines, ms": all_ms,
        "ratio": all_ms / ours_ms,
        "our lines of 256 engines, % of a core": 100 * 256 * ours_ms / 1000 / POLL_S,
        "all lines of 256 engines, % of a core": 100 * 256 * all_ms / 1000 / POLL_S,
    }
    show("parsing the metrics of an engine", [row], as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
