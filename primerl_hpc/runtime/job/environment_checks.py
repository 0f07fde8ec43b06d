"""Checks of a node's surroundings for the preflight: architecture, network plugin, binding to CPUs."""

from __future__ import annotations

import os
import platform
import re
import shlex
import socket
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from primerl_hpc.common.node.binding import Binding, describe_cpus
from primerl_hpc.runtime.job.gpu_checks import Results

PROXY_S = 5.0
PLUGINS = {"libfabric": "libnccl-net", "rccl": "librccl-net"}
"""Plugin of the profile → beginning of the library's name."""
CONTAINER_S = 60.0
"""Time for the start of an interpreter in a container."""
_FOREIGN = re.compile(r"exec format error|cannot execute binary file|image's architecture", re.IGNORECASE)
_ELF_MACHINES = {62: "x86_64", 183: "aarch64"}


def check_arch(wanted: str | None, pythons: Sequence[str]) -> Results:
    """Compare the node with the profile, and the interpreters with the node."""
    here = platform.machine()
    if wanted is not None and here != wanted:
        yield (
            "bad",
            f"the node is {here}, node.arch of the profile is {wanted}",
            "correct node.arch, or choose a partition whose nodes have this architecture",
        )
        return
    wrong = {python: found for python in pythons if (found := elf_arch(python)) not in (None, here)}
    for python, found in wrong.items():
        yield (
            "bad",
            f"{python} is built for {found}, the node is {here}",
            "create the environment on a node or login node of that architecture, and set software.default.python",
        )
    if not wrong:
        yield "ok", here


def check_containers(commands: Sequence[Sequence[str]]) -> Results:
    """Start the interpreter in each container. ``commands``: container command, image and interpreter."""
    for command in commands:
        start = [*command, "-c", "pass"]
        try:
            done = subprocess.run(
                start,
                capture_output=True,
                text=True,
                timeout=CONTAINER_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except FileNotFoundError:
            yield (
                "bad",
                f"{command[0]} is not installed here",
                "correct software.default.container of the profile",
            )
            continue
        except subprocess.TimeoutExpired:
            yield "warn", f"{shlex.join(command)} did not start within {CONTAINER_S:.0f} s", ""
            continue
        said = done.stderr.strip() or done.stdout.strip()
        if done.returncode and _FOREIGN.search(said):
            image = command[-2].removeprefix("--image=")  # of shifter
            yield (
                "bad",
                f"the container image {image} is built for another architecture than this node "
                f"({platform.machine()}): {said.splitlines()[-1]}",
                f"pull or build the image for {platform.machine()}",
            )
        elif done.returncode:
            reason = said.splitlines()[-1] if said else f"exit code {done.returncode}"
            yield "warn", f"{shlex.join(command)} failed: {reason}", "its roles will fail on this node"
        else:
            yield "ok", f"{command[-1]} starts in {command[-2]}"


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


def check_plugin(plugin: str, variables: Mapping[str, str]) -> Results:
    """Find the network plugin where the loader finds it: NCCL uses TCP without an error if it is missing."""
    if plugin == "none":
        return
    name = variables.get("NCCL_NET_PLUGIN") or os.environ.get("NCCL_NET_PLUGIN")
    folders = (variables.get("LD_LIBRARY_PATH") or os.environ.get("LD_LIBRARY_PATH") or "").split(":")
    found = find_library(PLUGINS[plugin], [*filter(None, folders), *_loader_folders()])
    if found is None and name and Path(name).is_file():
        found = name
    if found is not None:
        yield "ok", found
        return
    yield (
        "bad",
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


def check_proxy(address: str | None) -> Results:
    """Connect to the HTTP proxy; nothing is requested."""
    if address is None:
        return
    parts = urlsplit(address)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=PROXY_S):
            yield "ok", f"{address} accepts connections"
    except OSError as error:
        reason = error.strerror or error
        yield (
            "warn",
            f"the proxy {address} cannot be reached: {reason}",
            "ask the site, or correct network.proxy",
        )


def check_binding(wants: Mapping[str, Any] | None) -> Results:
    """Report the CPUs to which the processes of each GPU are bound."""
    if wants is None:
        return
    binding = Binding.from_json(wants)
    own = Binding(num_accelerators=binding.num_accelerators).cpus_by_accelerator()
    cpus = binding.cpus_by_accelerator()
    if cpus is None:
        yield (
            "warn",
            "the node reports no CPUs next to its GPUs: processes are not bound",
            "set node.numa_of_gpu",
        )
        return
    text = "; ".join(f"{index}: CPUs {describe_cpus(item)}" for index, item in enumerate(cpus))
    if binding.is_given and own is not None and own != cpus:
        others = "; ".join(f"{index}: CPUs {describe_cpus(item)}" for index, item in enumerate(own))
        yield (
            "warn",
            f"the profile binds {text}, but the node's topology is {others}",
            "correct node.numa_of_gpu",
        )
    else:
        yield "ok", text
