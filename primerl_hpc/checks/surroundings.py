"""Facts about what surrounds a process: architecture, containers, network plugin, proxy, binding to CPUs."""

from __future__ import annotations

import os
import platform
import re
import shlex
import socket
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from primerl_hpc.checks.findings import Finding, bad, ok, warn
from primerl_hpc.checks.table import Subject
from primerl_hpc.common.node.binding import Binding, describe_cpus

PROXY_S = 5.0
PLUGINS = {"libfabric": "libnccl-net", "rccl": "librccl-net"}
"""Plugin of the profile → beginning of the library's name."""
CONTAINER_S = 60.0
"""Time for the start of an interpreter in a container."""
_FOREIGN = re.compile(r"exec format error|cannot execute binary file|image's architecture", re.IGNORECASE)
_ELF_MACHINES = {62: "x86_64", 183: "aarch64"}


def architecture(subject: Subject) -> Iterator[Finding]:
    """Compare a node with the profile, and the interpreters with the nodes, as far as they are here."""
    here, wanted = platform.machine(), subject.wants.get("arch")
    if subject.is_node and wanted not in (None, here):
        yield bad(
            f"the node is {here}, node.arch of the profile is {wanted}",
            "correct node.arch, or choose a partition whose nodes have this architecture",
        )
        return
    if not subject.is_node and wanted is None:
        return
    nodes = here if subject.is_node else str(wanted)
    state = f"the node is {here}" if subject.is_node else f"nodes are {wanted}, this machine is {here}"
    here_too = [] if subject.is_node else [subject.profile.software.python_here]  # of the supervisor
    foreign = foreign_programs([*subject.wants["pythons"], *here_too], nodes)
    for python, built_for in foreign.items():
        yield bad(
            f"{python} is built for {built_for}, {state}",
            "create the environment on a node or login node of that architecture, and set software.default.python",
        )
    if not foreign:
        yield ok(here if subject.is_node else state)


def foreign_programs(programs: Sequence[str], arch: str) -> dict[str, str]:
    """Return the programs on this machine that are built for another architecture, with that architecture."""
    built_for = {program: elf_arch(program) for program in programs}
    return {program: found for program, found in built_for.items() if found not in (None, arch)}


def containers(subject: Subject) -> Iterator[Finding]:
    """Start the interpreter in each container: container command, image and interpreter."""
    for command in subject.wants.get("containers", ()):
        try:
            done = subprocess.run(
                [*command, "-c", "pass"],
                capture_output=True,
                text=True,
                timeout=CONTAINER_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except FileNotFoundError:
            hint = "correct software.default.container of the profile"
            yield bad(f"{command[0]} is not installed here", hint)
            continue
        except subprocess.TimeoutExpired:
            yield warn(f"{shlex.join(command)} did not start within {CONTAINER_S:.0f} s")
            continue
        output = done.stderr.strip() or done.stdout.strip()
        if done.returncode and _FOREIGN.search(output):
            image = command[-2].removeprefix("--image=")  # of shifter
            yield bad(
                f"the container image {image} is built for another architecture than this node "
                f"({platform.machine()}): {output.splitlines()[-1]}",
                f"pull or build the image for {platform.machine()}",
            )
        elif done.returncode:
            reason = output.splitlines()[-1] if output else f"exit code {done.returncode}"
            yield warn(f"{shlex.join(command)} failed: {reason}", "its roles will fail on this node")
        else:
            yield ok(f"{command[-1]} starts in {command[-2]}")


def elf_arch(program: str) -> str | None:
    """Return the architecture of a program from its ELF header; None for another file, or one that is not readable."""
    try:
        with open(program, "rb") as file:
            header = file.read(20)
    except OSError:
        return None
    return elf_machine(header)


def elf_machine(header: bytes) -> str | None:
    """Return the architecture from the first 20 bytes of an ELF file; None for another file."""
    if header[:4] != b"\x7fELF" or len(header) < 20:
        return None
    (machine,) = struct.unpack("<H" if header[5] == 1 else ">H", header[18:20])
    return _ELF_MACHINES.get(machine, f"ELF machine {machine}")


def network_plugin(subject: Subject) -> Iterator[Finding]:
    """Find the network plugin where the loader finds it: NCCL uses TCP without an error if it is missing."""
    plugin = subject.wants.get("plugin", "none")
    if plugin == "none" or not subject.has_gpus:
        return
    variables: Mapping[str, str] = subject.wants.get("plugin_env", {})
    name = variables.get("NCCL_NET_PLUGIN") or os.environ.get("NCCL_NET_PLUGIN")
    folders = (variables.get("LD_LIBRARY_PATH") or os.environ.get("LD_LIBRARY_PATH") or "").split(":")
    found = find_library(PLUGINS[plugin], [*filter(None, folders), *_loader_folders()])
    if found is None and name and Path(name).is_file():
        found = name
    if found is not None:
        yield ok(found)
        return
    yield bad(
        f"{PLUGINS[plugin]}*.so is neither in LD_LIBRARY_PATH nor known to the loader, so NCCL would use TCP",
        "load the site's module (software.modules), or set LD_LIBRARY_PATH in network.env; if a container has the "
        "plugin, set network.plugin to none",
    )


def find_library(beginning: str, folders: Sequence[str]) -> str | None:
    """Return the path of the first shared library whose name has this beginning."""
    for folder in folders:
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            if name.startswith(beginning) and ".so" in name:
                return os.path.join(folder, name)
    return None


def _loader_folders() -> list[str]:
    """Return the folders of the libraries in the loader's cache."""
    try:
        done = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    paths = [line.rpartition("=> ")[2].strip() for line in done.stdout.splitlines() if "=> " in line]
    return sorted({os.path.dirname(path) for path in paths if path.startswith("/")})


def proxy(subject: Subject) -> Iterator[Finding]:
    """Connect to the HTTP proxy; nothing is requested."""
    if (address := subject.wants.get("proxy")) is None:
        return
    parts = urlsplit(address)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=PROXY_S):
            yield ok(f"{address} accepts connections")
    except OSError as error:
        reason = error.strerror or error
        hint = "ask the site, or correct network.proxy"
        yield warn(f"the proxy {address} cannot be reached: {reason}", hint)


def binding(subject: Subject) -> Iterator[Finding]:
    """Report the CPUs to which the processes of each GPU are bound."""
    if (wants := subject.wants.get("binding")) is None or not subject.has_gpus:
        return
    planned = Binding.from_json(wants)
    own = Binding(num_accelerators=planned.num_accelerators).cpus_by_accelerator()
    cpus = planned.cpus_by_accelerator()
    if cpus is None:
        message = "the node reports no CPUs next to its GPUs: processes are not bound"
        yield warn(message, "set node.numa_of_gpu")
        return
    text = "; ".join(f"{index}: CPUs {describe_cpus(item)}" for index, item in enumerate(cpus))
    if planned.is_given and own is not None and own != cpus:
        others = "; ".join(f"{index}: CPUs {describe_cpus(item)}" for index, item in enumerate(own))
        message = f"the profile binds {text}, but the node's topology is {others}"
        yield warn(message, "correct node.numa_of_gpu")
    else:
        yield ok(text)
