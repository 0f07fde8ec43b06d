#!/usr/bin/env python3
"""Count the filesystem operations of an idle watcher with strace; write docs/measurements/footprint.json.

    tools/bench/footprint.py --engines 8,256 --seconds 30
    tools/bench/footprint.py --checkout ../before --label before

``--watcher router``: the router's check of published engines, at its own interval. ``--watcher supervisor``: a
supervisor whose processes have reported and sleep. ``--watcher orchestrator``: the watchers of an orchestrator that has
waited for hours, without engines that respond. ``--watcher engine_host``: the batch process of one elastic engine, also
after hours (``--engines`` is the number of other engines). An operation is a system call with a path in the run
directory, or one that reads the entries of a folder there. Supervisor and host also report the operations of their
start, up to the moment in which all processes have published their endpoints, and its seconds: some operations repeat
with time. ``--checkout`` measures another checkout, such as one of an earlier commit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "measurements" / "footprint.json"
CHILD = """
import sys, time
from pathlib import Path
from primerl_hpc.roles import router
from primerl_hpc.run import endpoints
from primerl_hpc.run.endpoints import publish_endpoint
from primerl_hpc.run.rundir import RunDir
run, engines, settle_s, seconds = RunDir(Path(sys.argv[1])), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
for index in range(engines):
    publish_endpoint(run, f"inference-{index}", f"https://h:{index}")
known = endpoints.PublishedEngines(run, "inference").urls if hasattr(endpoints, "PublishedEngines") else None
look = known or (lambda: router.published_engines(run))
end = time.monotonic() + settle_s
while time.monotonic() < end:
    look()
    time.sleep(router.POLL_S)
(run.root / "measured-from-here").touch()
end = time.monotonic() + seconds
while time.monotonic() < end:
    assert len(look()) == engines
    time.sleep(router.POLL_S)
"""
SUPERVISOR = """
import asyncio, os, sys, time
from pathlib import Path
from primerl_hpc.common.names import Role
from primerl_hpc.plan.plan import OnExit
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.supervisor import Supervisor
from tests.support.helpers import TOY_RECIPE, make_plan, process_plan
run, engines, settle_s, seconds = RunDir(Path(sys.argv[1])), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
sleep = ("/bin/sleep", "3600")
processes = [process_plan(Role.INFERENCE, index, argv=sleep) for index in range(engines)]
processes += [process_plan(role, argv=sleep) for role in (Role.ROUTER, Role.ORCHESTRATOR, Role.TRAINER)]
make_plan(run.root, TOY_RECIPE, processes=processes)
publish = '''
import sys
from pathlib import Path
from primerl_hpc.run.endpoints import publish_endpoint
from primerl_hpc.run.rundir import RunDir
for name in sys.argv[2:]:
    publish_endpoint(RunDir(Path(sys.argv[1])), name, "" if name in ("orchestrator-0", "trainer-0") else "http://h:1")
'''
(run.root / "started-from-here").touch()
supervisor = Supervisor(run)
async def main():
    attempt = asyncio.create_task(supervisor.run())
    states = lambda: supervisor.current.processes.values() if supervisor.current else ()
    while not states() or any(state.waiter is None for state in states()):
        await asyncio.sleep(0.1)
    names = [process.name for process in processes]
    await (await asyncio.create_subprocess_exec(sys.executable, "-c", publish, str(run.root), *names)).wait()
    while not all(state.has_reported for state in states()):
        await asyncio.sleep(0.1)
    (run.root / "started-to-here").touch()
    await asyncio.sleep(settle_s)
    (run.root / "measured-from-here").touch()
    await asyncio.sleep(seconds)
    (run.root / "measured-to-here").touch()
    run.stop_request.write_text('{"now": true}')
    await attempt
asyncio.run(main())
"""
AFTER_HOURS = """
for module in modules:
    module.paced = lambda waited_s, first_s, last_s: last_s
async def measure(*tasks):
    await asyncio.sleep(settle_s)
    (run.root / "measured-from-here").touch()
    await asyncio.sleep(seconds)
    (run.root / "measured-to-here").touch()
    for task in tasks:
        assert not task.done(), task
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
"""
ORCHESTRATOR = (
    """
import asyncio, sys, time
from pathlib import Path
from primerl_hpc.common.files import write_json, write_text
from primerl_hpc.orchestrator import event_loop
from primerl_hpc.orchestrator.engines import weight_watcher
from primerl_hpc.orchestrator.rollouts import env_client
from primerl_hpc.orchestrator.rollout_data import Split
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run import endpoints
from primerl_hpc.run.endpoints import publish_endpoint, read_endpoint
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import TOY_RECIPE
from tests.support.train_loop import make_train_loop
run, engines, settle_s, seconds = RunDir(Path(sys.argv[1])), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
modules = [event_loop, weight_watcher, env_client, endpoints]
class Healthy:
    async def health(self, timeout=None):
        return True
    async def close(self):
        pass
"""
    + AFTER_HOURS
    + """
async def main():
    for index in range(engines):
        publish_endpoint(run, f"inference-{index}", "http://127.0.0.1:9")
    publish_endpoint(run, "router-0", "http://127.0.0.1:9")
    publish_endpoint(run, "env_server-0", "tcp://127.0.0.1:9")
    run.checkpoints.mkdir()
    for version in (1, 2, 3):
        write_text(run.weights_step(version) / "STABLE", "")
    loop = make_train_loop(run, Recipe.model_validate(TOY_RECIPE))
    loop.watcher.version, loop.dispatcher.version = 3, 3
    loop.driver.router.endpoints = watch = getattr(loop.fleet, "endpoints", None)
    (client,) = {id(handle.client): handle.client for handle in loop.envs[Split.TRAIN]}.values()
    endpoint = read_endpoint(run, client.process)
    client._identity = tuple(endpoint[key] for key in ("attempt", "incarnation", "pid", "url"))
    client._client, client.endpoints = Healthy(), watch
    loop.watcher._leased_at, loop.watcher._source = time.monotonic(), str(run.weights_step(3))
    client._up.set()
    async def look_at_files():
        while True:
            loop.driver.dispatch(0)
            await loop._files.run_if_due()
            await asyncio.sleep(0.2)
    loop.driver.is_updating = True  # no rollout starts
    coroutines = (look_at_files(), loop.watcher.watch(), loop.engines.watch(), client._watch())
    await measure(*map(asyncio.create_task, coroutines))
asyncio.run(main())
"""
)
ENGINE_HOST = (
    """
import asyncio, os, sys, time
from pathlib import Path
from primerl_hpc.common.files import write_json, write_text
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.run.endpoints import publish_endpoint
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime import engine_host
from tests.support.helpers import TOY_RECIPE, make_plan, process_plan
run, engines, settle_s, seconds = RunDir(Path(sys.argv[1])), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
modules = [engine_host]
"""
    + AFTER_HOURS
    + """
engine = process_plan(Role.INFERENCE, argv=("/bin/sleep", "3600"))
plan = make_plan(run.root, TOY_RECIPE, processes=[process_plan(Role.TRAINER)])
phase = plan.phases[0].model_copy(update={"elastic": (engine,)})
write_json(run.plan, plan.model_copy(update={"phases": (phase,)}).model_dump(mode="json"))
write_json(run.state, {"state": RunState.RUNNING.value, "attempt": 1, "phase": phase.name})
write_json(run.job, {"scheduler": "slurm", "attempt": 1})
write_text(run.supervisor_lock, "{}")
for index in range(engines):
    publish_endpoint(run, f"inference-{index + 1}", "http://h:1")
os.environ.pop("SLURM_JOB_ID", None)
(run.root / "started-from-here").touch()
async def main():
    host = engine_host.EngineHost(run, 0)
    task = asyncio.create_task(host.run())
    while host.step is None:
        await asyncio.sleep(0.1)
    publish_endpoint(run, "inference-0", "http://h:1")
    while host.endpoint is None:
        await asyncio.sleep(0.1)
    (run.root / "started-to-here").touch()
    await measure()
    host._on_signal(15)
    await task
asyncio.run(main())
"""
)
CHILDREN = {
    "router": CHILD,
    "supervisor": SUPERVISOR,
    "orchestrator": ORCHESTRATOR,
    "engine_host": ENGINE_HOST,
}
_CALL = re.compile(r"^(\d+) +(\w+)\((.*)")


def count_operations(trace: str, folder: str, period: str = "measured") -> Counter[str]:
    """Count the calls of a trace of strace -f -y that name ``folder`` between the child's marks of a period.

    Calls of other programs, which the child started, do not count.
    """
    own, *others = re.findall(r"^(\d+) +execve\(", trace, re.M)
    _, _, rest = trace.partition(f"{period}-from-here")
    rest, _, _ = rest.partition(f"{period}-to-here")
    found: Counter[str] = Counter()
    paths: Counter[str] = Counter()
    for line in rest.splitlines()[1:]:
        call = _CALL.match(line)
        if call is None or folder not in call[3] or f"/{period}-" in call[3]:
            continue
        if call[1] == own or call[1] not in others:
            found[call[2]] += 1
            paths[re.split(r'[">]', call[3].partition(folder)[2])[0]] += 1
    print(period, paths.most_common(20), file=sys.stderr)
    return found


def measure(child: str, checkout: Path, engines: int, seconds: float, settle_s: float) -> dict[str, Any]:
    """Return operations per second of an idle watcher with this many engines, and those of its start if it marks it.

    ``child``: its program.
    """
    with tempfile.TemporaryDirectory() as folder:
        run, trace = Path(folder, "run"), Path(folder, "trace")
        words = [str(run), str(engines), str(settle_s), str(seconds)]
        options = ["-f", "-y", "--seccomp-bpf", "-e", "trace=%file,getdents64", "-o", str(trace)]
        subprocess.run(
            ["strace", *options, sys.executable, "-c", child, *words],
            env={**os.environ, "PYTHONPATH": str(checkout.resolve()), "PYTHONSAFEPATH": "1"},
            check=True,
        )
        text = trace.read_text(errors="replace")
        found = count_operations(text, str(run))
        start = count_operations(text, str(run), "started")
        marks = [run / f"started-{way}-here" for way in ("from", "to")]
        begin, end = (mark.stat().st_mtime if mark.exists() else 0.0 for mark in marks)
    rate = found.total() / seconds
    row: dict[str, Any] = {"engines": engines, "operations_per_s": round(rate, 2)}
    if start:
        row["start_operations"], row["start_s"] = start.total(), round(end - begin, 1)
    return row | {"calls": dict(found.most_common())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("--watcher", choices=CHILDREN, default="router")
    parser.add_argument("--label", default="now")
    parser.add_argument("--engines", default="8,256")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--settle", type=float, default=20.0, help="seconds before the measurement")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    counts = [int(word) for word in options.engines.split(",")]
    rows = [
        measure(CHILDREN[options.watcher], options.checkout, count, options.seconds, options.settle)
        for count in counts
    ]
    record = json.loads(options.out.read_text()) if options.out.exists() else {}
    record["machine"] = f"{platform.system()} {platform.release()}, local filesystem"
    record.setdefault(options.watcher, {})[options.label] = {"seconds": options.seconds, "rows": rows}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
