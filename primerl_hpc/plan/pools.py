"""Node pools: the nodes of one type that a plan may use. A role's layout selects its pool with ``node_type``.

pools = Pools(profile)
pools.of(recipe.layout.trainer.node_type, "layout.trainer").per_node        # accelerators of a node
"""

from __future__ import annotations

from dataclasses import dataclass

from primerl_hpc.cluster.node_types import Node
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.errors import ConfigError


@dataclass(frozen=True)
class NodePool:
    node_type: str | None
    """Name in ``node_types``; None: the profile's ``node``."""
    node: Node
    total: int
    """Maximum number of nodes in a job."""
    spare_nodes: int
    owner: str
    """For messages: ``profile 'x'`` or ``node type 'l40s' of profile 'x'``."""

    @property
    def per_node(self) -> int:
        return self.node.accelerators

    @property
    def work_nodes(self) -> int:
        return self.total - self.spare_nodes


class Pools:
    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        owner = f"profile '{profile.name}'"
        spares = profile.scheduler.spare_nodes
        self.default = NodePool(None, profile.node, profile.nodes, spares, owner)
        self.by_type: dict[str | None, NodePool] = {None: self.default}
        for name, node_type in profile.node_types.items():
            self.by_type[name] = NodePool(
                name, node_type, node_type.nodes, node_type.spare_nodes, f"node type '{name}' of {owner}"
            )

    def of(self, node_type: str | None, key: str) -> NodePool:
        """Return the pool of a layout. Raises ConfigError for a type that the profile does not have."""
        if node_type in self.by_type:
            return self.by_type[node_type]
        known = ", ".join(self.profile.node_types)
        raise ConfigError(
            f"{key}.node_type: profile '{self.profile.name}' has no node type '{node_type}'",
            hint=f"use one of {known}, or null for the profile's node"
            if known
            else "add it to node_types of the profile, or remove the key",
        )


def nodes_of(engines: int, size: int, per_node: int) -> int:
    """Return the nodes of engines of ``size`` accelerators each that share no node with other roles."""
    span, together = max(1, size // per_node), max(1, per_node // size)
    return -(-engines // together) * span
