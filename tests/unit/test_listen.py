"""Where processes listen: the profile's interface reaches all of them, and one that a node has not is said in words."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common import listen
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.listen import LOCAL_PORTS, free_port, free_ports, listen_host
from primerl_hpc.common.names import Role
from primerl_hpc.plan.env import process_env
from primerl_hpc.recipe.load import load_recipe


def environment_of(network: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of a trainer under a profile with this ``network`` block; in force here too."""
    profile = Profile.model_validate({"name": "site", "network": network})
    variables = process_env(Role.TRAINER, load_recipe("reverse_text/tiny").recipe, profile)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return variables


def test_processes_listen_on_the_interface_of_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    said = environment_of({"interface": "lo", "env": {"NCCL_SOCKET_IFNAME": "ib0,ib1"}}, monkeypatch)
    assert listen_host(2) == "127.0.0.1"
    assert (said["NCCL_SOCKET_IFNAME"], said["GLOO_SOCKET_IFNAME"]) == ("ib0,ib1", "lo")


def test_an_interface_that_a_node_has_not_is_refused_with_those_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment_of({"interface": "ib7"}, monkeypatch)
    with pytest.raises(
        ConfigError, match=r"on interface ib7.*network\.interface of the profile: one of .*lo"
    ):
        listen_host(2)
    assert listen_host(1) == "127.0.0.1"


def test_a_port_told_to_a_child_is_none_that_a_connection_may_take_meanwhile() -> None:
    lowest = int(LOCAL_PORTS.read_text().split()[0])
    for _ in range(50):
        assert free_port("127.0.0.1") < lowest
    first = free_ports("127.0.0.1", 3)
    for port in range(first, first + 3):
        with socket.create_server(("127.0.0.1", port)):
            pass


@pytest.mark.parametrize("connections", ["1024 65535", "12000 60999"])
def test_where_connections_take_all_ports_any_free_one_is_told(
    connections: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text(connections)
    monkeypatch.setattr(listen, "LOCAL_PORTS", tmp_path / "range")
    with socket.create_server(("127.0.0.1", free_port("127.0.0.1"))):
        pass
