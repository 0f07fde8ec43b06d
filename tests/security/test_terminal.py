"""Text of models, log files and folders of other users neither controls the user's terminal nor runs a command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import append_json, write_json
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.common.safety.terminal import plain, without_control
from primerl_hpc.observe.inside.panes import open_session, panes_of, session_name
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import TOY_RECIPE, captured, make_plan, process_plan
from tests.support.terminal import Terminal

TITLE, CLIPBOARD, C1, OVERRIDE = "\x1b]0;stolen\x07", "\x1b]52;c;cm0gLXJmCg==\x07", "\x9b2J", "\u202e"
HOSTILE = f"x{TITLE}{CLIPBOARD}{C1}\r\x08y"
RED = "\x1b[31m"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A failed run in whose files every text is hostile."""
    make_plan(tmp_path / "run", TOY_RECIPE, processes=[process_plan(Role.TRAINER)])
    run = RunDir(tmp_path / "run")
    now = time.time()
    failed = {"attempt": 1, "state": RunState.FAILED, "phase": "main", "updated": now, "message": HOSTILE}
    write_json(run.state, failed | {"processes": {f"trainer-0{TITLE}": {"state": HOSTILE}}})
    append_json(run.events, {"time": now, "event": HOSTILE, "value": HOSTILE})
    failure = {"attempt": 1, "process": "trainer-0", "node": HOSTILE, "exit_code": 1, "signal": None}
    more = {"rank": None, "message": HOSTILE, "last_lines": [HOSTILE], "log": HOSTILE}
    write_json(run.failure, failure | more)
    log = run.attempt_logs(1) / "trainer-0.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"12:00:00 trainer {RED}colored\x1b[0m {HOSTILE}\n")
    row = {"env": f"e{TITLE}", "reward": 1.0, "prompt": HOSTILE, "completion": f"{RED}{OVERRIDE}{HOSTILE}"}
    append_json(run.traces("train"), row)
    write_json(run.scores.with_suffix(".json"), {})
    append_json(run.scores, {"step": 0, "environment": f"e{TITLE}", "avg@1": 1.0, "time": now})
    return run


def escapes_of(shown: str) -> set[str]:
    """Return the control characters of an output other than those of colors."""
    for number in (*range(10), 22, 30, 31, 32, 33, 34, 35, 36, 37, 39, 90, 91, 92, 93, 94, 95, 96, 97):
        shown = shown.replace(f"\x1b[{number}m", "")
    return {char for char in shown if char < " " or "\x7f" <= char <= "\x9f"} - {"\n", "\t"}


@pytest.mark.parametrize(
    "words",
    [
        ("samples",),
        ("samples", "--full"),
        ("samples", "--env", f"other{TITLE}"),
        ("samples", "--json"),
        ("logs",),
        ("logs", "--json"),
        ("status",),
        ("status", "--json"),
        ("diagnose",),
        ("scores",),
    ],
    ids=" ".join,
)
def test_a_command_prints_no_control_characters_of_a_runs_files(
    run: RunDir, tmp_path: Path, words: tuple[str, ...]
) -> None:
    command, *options = words
    with Terminal("primerl_hpc", command, str(run.root), *options, cwd=tmp_path) as terminal:
        terminal.end()
    assert escapes_of(terminal.shown) == set(), terminal.shown
    assert "Traceback" not in terminal.shown
    if command == "logs" and not options:
        assert f"{RED}colored" in terminal.shown, "colors of a log stay"
    if "--json" in words:
        json.loads(terminal.shown.splitlines()[0] if command == "logs" else terminal.shown)


def test_the_watched_screen_shows_no_control_characters_of_a_runs_files(run: RunDir, tmp_path: Path) -> None:
    with Terminal("primerl_hpc", "status", str(run.root), "--watch", cwd=tmp_path) as terminal:
        terminal.wait_for("stolen")
        terminal.press("\x03")
        assert terminal.end() == 0
    for part in (TITLE, CLIPBOARD, C1, "\x1b]"):
        assert part not in terminal.shown


def test_text_of_a_model_has_neither_colors_nor_bidirectional_controls() -> None:
    reply = f"Grüße 日本語 👨\u200d👩\u200d👧 a\u00a0b\n\tc {RED}{OVERRIDE}{HOSTILE}"
    shown = plain(reply)
    assert shown.startswith("Grüße 日本語 👨\u200d👩\u200d👧 a\u00a0b\n\tc ")
    assert not set(shown) & set("\x1b\x07\x9b\r\x08\u202e") and "\\x1b[31m" in shown
    assert without_control(f"{RED}a") == f"{RED}a" and "\x1b" not in without_control("\x1b" + "[1;31H")


def test_chat_prints_a_reply_as_text(run: RunDir, tmp_path: Path) -> None:
    """A reply arrives in pieces, which may divide a sequence."""
    code = """
from pathlib import Path
from primerl_hpc.cli import chat
from primerl_hpc.observe.chat import Server
from primerl_hpc.run.access.keys import RunKeys
from primerl_hpc.run.rundir import RunDir

class Replying(Server):
    def answer(self, messages, sampling):
        yield from ("a", "\\x1b", "]0;stolen\\x07", "\\x1b[31m", "\\x9b2J", "end")

chat._request_reply(Replying(RunDir(Path()), "", "", RunKeys(Path())), [], {}, is_quiet=False)
"""
    (tmp_path / "chatting.py").write_text(code)
    with Terminal("chatting", cwd=tmp_path) as terminal:
        terminal.end()
    assert terminal.shown.startswith("a\\x1b]0;stolen\\x07\\x1b[31m\\x9b2Jend\n"), terminal.shown


def test_an_error_shows_no_control_characters(tmp_path: Path) -> None:
    code = (
        "from primerl_hpc.cli import main; from primerl_hpc.common.errors import DataError\n"
        f"def fail(**_): raise DataError({HOSTILE!r}, location={HOSTILE!r}, hint={HOSTILE!r})\n"
        "main.cli.main = fail\nmain.main()\n"
    )
    done = captured([sys.executable, "-c", code])
    assert done.returncode == DataError.exit_code and escapes_of(done.stderr) == set(), done.stderr


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_the_name_of_a_run_is_not_executed_by_tmux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tmux executes ``#(command)`` in names of sessions and windows, and a run's folder may be a colleague's."""
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "x#(touch planted)"
    make_plan(root, TOY_RECIPE, processes=[process_plan(Role.TRAINER)])
    run = RunDir(root)
    words = ["tmux", "list-windows", "-a", "-F", "#S #W"]
    try:
        assert open_session(session_name([run]), {root.name: panes_of(run)})
        names = captured(words, check=True).stdout
        # an executed command is replaced by its output
        assert names.split() == ["primerl-x--touch-planted-", "x--touch-planted-"]
        assert not (tmp_path / "planted").exists()
    finally:
        subprocess.run(["tmux", "kill-server"], check=False, capture_output=True)
