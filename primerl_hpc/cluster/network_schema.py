"""Blocks ``network`` and ``preflight`` of the cluster profile: the network between nodes, and checks of nodes."""

from __future__ import annotations

import re
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from primerl_hpc.cluster.value_types import OneLine, Word
from primerl_hpc.common.block import Block, Bool, NonNegativeFloat, PositiveInt, Variables


class Proxy(Block):
    """HTTP proxy through which compute nodes reach the internet."""

    http: str | None = None
    """Proxy of http addresses, e.g. ``http://proxy.site:3128``."""
    https: str | None = None
    """Proxy of https addresses; null: ``http``."""
    no_proxy: tuple[OneLine, ...] = ()
    """Hosts and domains that are reached directly. The run adds its own nodes, their addresses and the loopback."""

    @field_validator("http", "https")
    @classmethod
    def _address_is_a_url(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"(https?|socks5h?)://[^\s/@]+:\d+/?", value):
            raise ValueError(
                "must be an address with a port and without credentials, such as http://proxy.site:3128"
            )
        return value

    @model_validator(mode="after")
    def _an_address_is_given(self) -> Self:
        if self.http is None and self.https is None:
            raise ValueError("http or https must be given")
        return self


class Network(Block):
    """Network between nodes."""

    interface: Word | None = None
    """Interface between nodes, e.g. ``ib0``: processes listen on its address, and NCCL and Gloo use it unless ``env``
    sets another one. Null: the address of the node's name."""
    interfaces: tuple[Word, ...] = ()
    """Interfaces of NCCL (``NCCL_SOCKET_IFNAME``), or one prefix such as ``hsn``, where a node has several. Null:
    ``interface``."""
    host_suffix: OneLine | None = None
    """Text appended to a node's name to get its name in the fast network (``i``, ``-ib0``), if ``interface`` is
    null."""
    plugin: Literal["libfabric", "rccl", "none"] = "none"
    """Network plugin that NCCL or RCCL must find on the nodes: ``libnccl-net*.so`` (AWS OFI, libfabric) or
    ``librccl-net*.so``. Without it they use TCP without an error, so the preflight checks it."""
    proxy: Proxy | None = None
    env: Variables = Field(default_factory=dict)
    """Environment variables of NCCL, UCX and libfabric."""

    @field_validator("host_suffix")
    @classmethod
    def _suffix_is_part_of_a_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z0-9.-]+", value):
            raise ValueError("must be part of a host name")
        return value


class PreflightSettings(Block):
    """Checks of every node before an attempt starts its first process. Bad nodes are not used."""

    removed: ClassVar[dict[str, str]] = {
        "sums_timeout_s": "raise preflight.timeout_s: the sums may take 180 s more"
    }
    enabled: Bool = True
    """Run the checks."""
    timeout_s: PositiveInt = 120
    """Time limit in seconds; nodes without results by then are bad. The sums may take 180 s more."""
    min_scratch_gib: NonNegativeFloat = 1.0
    """Minimum free space of the node's scratch folder in GiB."""
    min_memory_gib: NonNegativeFloat = 1.0
    """Minimum available memory of a node in GiB."""
    sums: Literal["auto", "always", "never"] = "auto"
    """Compare an all-reduce over all nodes with its known result before an attempt. ``auto``: where GPUs of several
    nodes exchange tensors."""
    bandwidth: Literal["always", "never"] = "never"
    """Measure file reads and all-reduce between pairs of the trainer's nodes before an attempt, in up to 30 s. A spare
    replaces a node below 70 % of the median."""
    health_checks: tuple[OneLine, ...] = ()
    """Additional commands, run by bash on every node; a node is bad if one of them exits with a code other than 0."""

    @property
    def sums_timeout_s(self) -> int:
        """Return the time limit of the sums in seconds, including the start of torch on the nodes."""
        return self.timeout_s + 180
