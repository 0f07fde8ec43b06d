"""Pairs of nodes that measure with each other, and the choice of the slow ones. Pure.

rounds_of(4, 3)                          # [[(0, 3), (1, 2)], [(0, 2), (3, 1)], [(0, 1), (2, 3)]]
slow_nodes({"n1": 9.8, "n2": 10.1, "n3": 4.2})                # {"n3": 0.43}
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

LEAST_SHARE = 0.7
"""A node with a smaller share of the median bandwidth is slow."""


def rounds_of(num_nodes: int, limit: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs by the circle method: over all rounds, every node meets every other one once.

    With an odd number of nodes, one of them rests in each round. At most ``limit`` rounds.
    """
    places: list[int | None] = [*range(num_nodes)]
    if num_nodes % 2:
        places.append(None)
    rounds = []
    for _ in range(min(limit, len(places) - 1)):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(a, b) for a, b in pairs if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def slow_nodes(values: Mapping[str, float]) -> dict[str, float]:
    """Return the nodes below `LEAST_SHARE` of the median, with their share. ``values``: the best of each node.

    A node's best pair counts, so that the partners of a slow node are not slow themselves.
    """
    if not values or (middle := median(values.values())) <= 0:
        return {}
    return {node: value / middle for node, value in values.items() if value < LEAST_SHARE * middle}
