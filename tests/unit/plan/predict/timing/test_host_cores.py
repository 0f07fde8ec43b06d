"""CPU cores of the roles without GPUs: the measured costs, the warnings, the number of servers, the table in docs."""

from __future__ import annotations

import json

import pytest

from primerl_hpc.plan.env_servers import raise_servers
from primerl_hpc.plan.predict.timing.host_cores import (
    API_SERVERS,
    COSTS,
    ENVIRONMENTS,
    ORCHESTRATOR,
    ROUTER,
    full_processes,
    host_cores,
    servers_for,
)
from primerl_hpc.recipe.load import load_recipe
from tests.support.helpers import ROOT

ROLES = {
    ENVIRONMENTS: "env_server",
    API_SERVERS: "api_server",
    ROUTER: "router",
    ORCHESTRATOR: "orchestrator",
}
TOKENS_PER_NODE = 30_000
"""Generated tokens per second of a node of eight GPUs in the table of docs/prediction.md."""
TURN_TOKENS = 300


@pytest.mark.parametrize(("size", "turns", "tokens"), [("7", 1, 7), ("10x7", 10, 70), ("256", 1, 256)])
def test_the_costs_agree_with_the_measurements(size: str, turns: int, tokens: int) -> None:
    rows = json.loads((ROOT / "docs/measurements/loop.json").read_text())["rows"]
    row = next(row for row in reversed(rows) if row["size"] == size and row.get("checkout") == "after")
    for name, figure in host_cores(1.0, turns, tokens).items():
        measured = row["cpu_ms_per_rollout"][ROLES[name]] / 1e3
        assert figure.low <= measured <= figure.high, name


def test_roles_that_are_too_busy_are_named_with_the_number_that_suffices() -> None:
    figures = host_cores(rollouts=1000.0, turns=10, tokens=70_000.0)
    sentences = list(full_processes(figures, servers=4, engines=2))
    assert servers_for(figures[ENVIRONMENTS]) == 22
    assert sentences[0] == (
        "the environment servers need 14.9 cores, but use at most 4: engines wait for them; "
        "set environments.train.servers to 22"
    )
    assert [sentence.split(" needs ")[0] for sentence in sentences[1:]] == [
        "the API server of each engine", "the router", "the orchestrator",
    ]  # fmt: skip
    assert [s for s in full_processes(figures, servers=22, engines=2) if "environment" in s] == []
    assert list(full_processes(host_cores(10.0, 10, 700.0), servers=1, engines=1)) == []
    assert list(full_processes({}, servers=1, engines=1)) == []


def test_servers_for_training_are_raised_to_the_predicted_rate_within_half_of_the_cores() -> None:
    environments = "environments.train=[{id: a, ratio: 3.0}, {id: b}, {id: c, ratio: 4.0, servers: 2}]"
    recipe = load_recipe("reverse_text/tiny", overrides=[environments]).recipe
    raised, notes = raise_servers(recipe, 16, cores=64)
    assert [each.servers for each in raised.environments.train] == [6, 2, 2]
    assert notes[0] == "environment a (train): 6 servers for the predicted rate" and len(notes) == 2
    assert [each.servers for each in raise_servers(recipe, 400, cores=64)[0].environments.train] == [12, 4, 2]
    assert raise_servers(recipe, 1, cores=64) == (recipe, ())


def test_the_table_of_the_documentation_is_current() -> None:
    page = (ROOT / "docs" / "prediction.md").read_text()
    for turns in (1, 10, 50):
        for nodes in (1, 8, 128):
            tokens = float(TOKENS_PER_NODE * nodes)
            figures = host_cores(tokens / (TURN_TOKENS * turns), turns, tokens)
            cells = [f"{figures[name].value:.2g}" for name in COSTS]
            assert f"| {turns} | {nodes} | {' | '.join(cells)} |" in page
