"""Addresses to listen on: all processes use the interface of the profile; a missing one is refused with the others."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import Role
from primerl_hpc.plan.env import process_env
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.run import ports as listen
from primerl_hpc.run.ports import LOCAL_PORTS, free_port, free_ports, listen_host


def environment_of(network: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return a trainer's variables under a profile with this ``network`` block, and set them in this process."""
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
        ConfigError, match=r"on interface ib7.*network\.interface of the profile to one of .*lo"
    ):
        listen_host(2)
    assert listen_host(1) == "127.0.0.1"


def test_collectives_listen_on_the_interface_whose_address_peers_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the host name means 127.0.1.1, as at some sites: gloo's own choice would be an address of each peer."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", env.INTERFACE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    assert listen.interface_of("127.0.0.1") == "lo" and listen.interface_of("203.0.113.7") is None
    monkeypatch.setattr(
        listen, "listen_host", lambda num_nodes: "127.0.0.1" if num_nodes == 2 else "203.0.113.7"
    )
    listen.set_collective_interfaces(3)  # no interface has the address
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    listen.set_collective_interfaces(2)
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    listen.set_collective_interfaces(1)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_a_port_for_a_child_is_outside_the_range_of_outgoing_connections() -> None:
    lowest = int(LOCAL_PORTS.read_text().split()[0])
    for _ in range(50):
        assert free_port("127.0.0.1") < lowest
    first = free_ports("127.0.0.1", 3)
    for port in range(first, first + 3):
        with socket.create_server(("127.0.0.1", port)):
            pass


@pytest.mark.parametrize("connections", ["1024 65535", "12000 60999"])
def test_where_connections_take_all_ports_any_free_one_is_returned(
    connections: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text(connections)
    monkeypatch.setattr(listen, "LOCAL_PORTS", tmp_path / "range")
    with socket.create_server(("127.0.0.1", free_port("127.0.0.1"))):
        pass
