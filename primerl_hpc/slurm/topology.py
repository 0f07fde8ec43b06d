"""Order of the hosts of a job by the switches or blocks of the network, from ``scontrol show topology``. Pure.

    switches = parse_topology(output, expand)           # {"n1": (2, 0), …}: positions of the host's switches
    by_switch(["n1", "n5", "n2"], switches)             # ["n1", "n2", "n5"]

Formats: ``SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[0-3]`` and ``SwitchName=s2 Level=1 … Nodes=n[0-7] Switches=s[0-1]``
(topology/tree; every level lists the nodes below it), ``BlockName=b1 BlockIndex=0 Nodes=n[01-18] BlockSize=18`` and
``AggregatedBlock=b[1-2] BlockIndex=2 Nodes=…`` (topology/block). See slurm.schedmd.com/topology.html.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

_FIELD = re.compile(r"(\w+)=(\S+)")


def parse_topology(output: str, expand: Callable[[str], Iterable[str]]) -> dict[str, tuple[int, ...]]:
    """Return for each host the positions of the switches above it, from the top; empty without a topology.

    ``expand``: returns the hosts of a list such as ``n[0-3]``.
    """
    rows = []
    for number, line in enumerate(output.splitlines()):
        fields = dict(_FIELD.findall(line))
        if "SwitchName" in fields and fields.get("Level", "").isdigit():
            level = int(fields["Level"])
        elif "BlockName" in fields or "AggregatedBlock" in fields:
            # aggregated blocks have more blocks, and so more nodes
            level = 0 if "BlockName" in fields else len(list(expand(fields.get("Nodes", ""))))
        else:
            continue
        rows.append((level, number, list(expand(fields.get("Nodes", "")))))
    found: dict[str, tuple[int, ...]] = {}
    for _, number, hosts in sorted(rows, key=lambda row: -row[0]):
        for host in hosts:
            found[host] = (*found.get(host, ()), number)
    return found


def by_switch(hosts: Sequence[str], switches: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the hosts with those of each switch together. The first host stays the first.

    Switches follow in the order of their first host, and so do the hosts of one switch.
    """
    first_seen: dict[tuple[int, ...], int] = {}
    for host in hosts:
        path = switches.get(host, ())
        for length in range(1, len(path) + 1):
            first_seen.setdefault(path[:length], len(first_seen))

    def position(host: str) -> list[int]:
        path = switches.get(host, ())
        return [first_seen[path[:length]] for length in range(1, len(path) + 1)]

    known = [host for host in hosts if host in switches]
    if len(known) < len(hosts):
        return list(hosts)  # an incomplete answer would separate hosts at random
    return sorted(known, key=position)
