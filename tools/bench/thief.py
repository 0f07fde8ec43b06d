#!/usr/bin/env python3
"""Start complete runs while another user of the machine takes the place of ranks in gloo groups: who runs whose code?

    tools/bench/thief.py                            # 5 starts of each case, about half a minute each; needs root and cc
    tools/bench/thief.py --cases sft --starts 20 --json
    tools/bench/thief.py --told                     # a stronger attacker than exists: it knows the sequence numbers
    tools/bench/thief.py --checkout ../before --limit 60        # of a revision without proofs of membership

The runs are those of user 47001. The thief (tests/support/gloo_thief.c) is user 65534 without key or files of the run.
It finds the run's new listeners as `ss` does, connects to each 200 times with guessed sequence numbers, and as a peer
sends a pickle that writes a file. With ``--told``, the listeners of a copy of the package start at the first sequence
number, and the thief sends the first numbers, as it does with ``--checkout``. It would win every race, so it stops
after three accepted connections, which it keeps. Columns: connections that gloo accepted as a rank; starts in which a
command of the thief ran, in which a group was formed again (at least two tries), and in which a role was restarted;
final states of the runs, and whether they were cancelled after ``--limit`` seconds; median seconds to the first step.
Exits with 1 if a command ran or a run did not end as done.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from listeners import RL, SMALL
from machine import ROOT, conclude

from primerl_hpc.common.files import read_json_or_none, read_jsonl
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport import members
from tests.support.runs import SFT_RECIPE, TINY, events
from tests.support.stranger import NOBODY, Command

VICTIM = 47001
GUESSES = (-members.MAX_SKIPPED, 200)
FIRST_NUMBERS = (0, 6)
MOST_ACCEPTED = 3
"""Connections of a thief who knows the numbers, for each start."""
SFT = ("max_steps=4", "sft.batch_size=16", "checkpoint.interval=null", "weights.interval=null")
CASES: dict[str, tuple[str, ...]] = {
    "sft": (*SFT, "layout.trainer.ranks=2"),
    "sft, 4 ranks, TP 2": (*SFT, "layout.trainer.ranks=4", "layout.trainer.tensor_parallel=2"),
    "rl, 2 ranks": (*SMALL, "layout.trainer.ranks=2"),
    "rl, engine with DP 2": (*SMALL, "layout.inference.data_parallel=2", "layout.inference.replicas=1"),
}


class Victim:
    """A user who runs the commands of a checkout in ``folder``."""

    def __init__(self, folder: Path, checkout: Path) -> None:
        self.folder, self.checkout = folder, checkout
        for own in (folder / "home", folder / "runs"):
            own.mkdir(exist_ok=True)
            os.chown(own, VICTIM, VICTIM)

    def start(
        self, *words: str, program: str = sys.executable, groups: Sequence[int] = (), **options: Any
    ) -> subprocess.Popen[str]:
        """Start ``program WORDS``; ``env``: variables in addition to those of this process."""
        environment = {**os.environ, "PYTHONPATH": str(self.checkout), "HOME": str(self.folder / "home")}
        environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **options.pop("env", {})}
        return subprocess.Popen(
            [program, *words], env=environment, user=VICTIM, group=VICTIM, extra_groups=groups,
            **{"cwd": self.folder, "text": True, "stdout": sys.stderr, **options},
        )  # fmt: skip

    def submit(self, recipe: str, run: Path, settings: Sequence[str], *more: str) -> list[str]:
        """Return the words of a submission on this machine."""
        words = [word for text in settings for word in ("--set", text)]
        return ["-m", "primerl_hpc", "submit", recipe, "-p", "local", "--run-dir", str(run), *words, *more]


class Thief:
    """The program of the stranger."""

    def __init__(self, folder: Path, numbers: tuple[int, int]) -> None:
        self.folder, self.numbers = folder / "stranger", numbers
        self.folder.mkdir()
        folder.chmod(0o711)
        self.folder.chmod(0o777)
        self.program, self.mark, self.pickle = (self.folder / name for name in ("thief", "ran", "pickle"))
        source = ROOT / "tests" / "support" / "gloo_thief.c"
        subprocess.run(["cc", "-O2", "-pthread", "-o", str(self.program), str(source)], check=True)
        data = pickle.dumps(Command(self.mark))
        self.pickle.write_bytes(data + b"." * (-len(data) % 8))

    @contextlib.contextmanager
    def working(self) -> Iterator[subprocess.Popen[bytes]]:
        """Let it work until the end of the context."""
        self.mark.unlink(missing_ok=True)
        with self.program.open("rb") as executable, self.pickle.open("rb") as content:
            paths = [f"/proc/self/fd/{file.fileno()}" for file in (executable, content)]
            with (self.folder / "said").open("wb") as output:
                process = subprocess.Popen(
                    [paths[0], str(VICTIM), "3600", paths[1], *map(str, self.numbers)],
                    stdout=output, user=NOBODY, group=NOBODY, extra_groups=[],
                    pass_fds=[executable.fileno(), content.fileno()],
                )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    @property
    def num_accepted(self) -> int:
        return (self.folder / "said").read_text().count("accepted")


def start(
    case: str, number: int, victim: Victim, thief: Thief, options: argparse.Namespace
) -> dict[str, Any]:
    """Run the case once, and return what happened in it."""
    run = RunDir(victim.folder / "runs" / f"{list(CASES).index(case)}-{number}")
    recipe = "sft.yaml" if case.startswith("sft") else RL
    began, ending = time.time(), ""
    with thief.working() as process:
        follower = victim.start(*victim.submit(recipe, run.root, CASES[case], "--follow"))
        while follower.poll() is None and time.time() - began < options.limit:
            if options.told and thief.num_accepted >= MOST_ACCEPTED:
                process.send_signal(signal.SIGSTOP)
            time.sleep(0.1)
        if follower.poll() is None:
            follower.kill()
            ending = f", after {options.limit:.0f} s"
            victim.start("-m", "primerl_hpc", "cancel", "--now", "--wait", str(run.root)).wait()
        follower.wait()
    logs = "".join(path.read_text(errors="replace") for path in (run.root / "logs").rglob("*.log"))
    steps = run.metrics("sft" if recipe == "sft.yaml" else "trainer")
    first = next(iter(read_jsonl(steps)), {}) if steps.exists() else {}
    return {
        "accepted": thief.num_accepted,
        "ran": thief.mark.exists(),
        "formed again": "forming a process group of" in logs,
        "restarted": bool(events(run, "role_restarting") + events(run, "recovery_started")),
        "state": f"{(read_json_or_none(run.state) or {}).get('state')}{ending}",
        "first step s": first.get("time", float("nan")) - began,
    }


def attack(case: str, victim: Victim, thief: Thief, options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a case."""
    starts = []
    for number in range(options.starts):
        starts.append(start(case, number, victim, thief, options))
        print(case, json.dumps(starts[-1]), file=sys.stderr, flush=True)
    times = [each["first step s"] for each in starts if each["first step s"] > 0]
    return {
        "case": case,
        "starts": len(starts),
        "accepted": sum(each["accepted"] for each in starts),
        **{
            f"starts: {what}": sum(bool(each[what]) for each in starts)
            for what in ("accepted", "ran", "formed again", "restarted")
        },
        "states": dict(Counter(each["state"] for each in starts)),
        "first step s": round(statistics.median(times), 1) if times else None,
    }


def with_first_numbers(folder: Path) -> Path:
    """Return a copy of this checkout in which the sequence numbers of all listeners start at the first one.

    Proofs have a shorter time limit, so that several tries fit in ``--limit``.
    """
    copy, module = folder / "told", Path("primerl_hpc/transport/members.py")
    copy.mkdir()
    for path in ROOT.iterdir():
        if path.name != "primerl_hpc":
            (copy / path.name).symlink_to(path)
    shutil.copytree(ROOT / "primerl_hpc", copy / "primerl_hpc", ignore=shutil.ignore_patterns("__pycache__"))
    text = (ROOT / module).read_text()
    for line, other in (
        ("\nMAX_SKIPPED = 1 << 12\n", "\nMAX_SKIPPED = 1\n"),
        ("\nPROOF_S = 10.0\n", "\nPROOF_S = 3.0\n"),
    ):
        assert text.count(line) == 1, line
        text = text.replace(line, other)
    (copy / module).write_text(text)
    return copy


def make_models(folder: Path, checkout: Path) -> None:
    """Create the tiny model, its data, and the SFT recipe of the cases."""
    command = [str(ROOT / "tools" / "tiny-model"), "outputs/tiny"]
    subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr)
    subprocess.run(["chown", "-R", str(VICTIM), "outputs"], cwd=folder, check=True)
    tiny = checkout / TINY.relative_to(ROOT)
    (folder / "sft.yaml").write_text(SFT_RECIPE.format(tiny=tiny, data="outputs/tiny/sft.jsonl"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--starts", type=int, default=5, help="of each case [default: 5]")
    parser.add_argument("--told", action="store_true", help="the thief knows the sequence numbers")
    parser.add_argument(
        "--checkout", type=Path, help="another revision, of which the thief knows the numbers"
    )
    parser.add_argument(
        "--limit", type=float, default=300, help="seconds until a run is cancelled [default: 300]"
    )
    parser.add_argument("--json", action="store_true", dest="as_json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-thief-") as name:
        folder = Path(name)
        checkout = (options.checkout or ROOT).resolve()
        make_models(folder, checkout)
        victim = Victim(folder, with_first_numbers(folder) if options.told else checkout)
        is_told = options.told or options.checkout is not None
        thief = Thief(folder, FIRST_NUMBERS if is_told else GUESSES)
        rows = [attack(case, victim, thief, options) for case in options.cases]
    wrong = [
        f"{row['case']}: {row['starts: ran']} commands of the thief ran" for row in rows if row["starts: ran"]
    ]
    wrong += [f"{row['case']}: {row['states']}" for row in rows if row["states"].keys() != {"done"}]
    what = "the first sequence numbers" if is_told else f"{GUESSES[1]} guesses"
    what = f"Complete runs next to a stranger who takes the place of ranks: {what} at each listener"
    return conclude(what, rows, wrong, as_json=options.as_json)


if __name__ == "__main__":
    sys.exit(main())
