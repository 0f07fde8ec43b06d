"""The processes of a run on one node listen only on loopback, as documented in docs/security.md.

`tools/bench/listeners.py` has the complete runs (adapters, deltas, broadcast, parallelism, distillation).
"""

from __future__ import annotations

import ipaddress
import json

import psutil
import pytest

from tests.support.helpers import ROOT
from tests.support.serving import Serving

pytestmark = pytest.mark.e2e


def test_engine_router_and_environment_server_listen_on_loopback_only(serving: Serving) -> None:
    for name, process in serving.processes.items():
        root = psutil.Process(process.pid)
        tree = [root, *root.children(recursive=True)]
        sockets = [socket for each in tree for socket in each.net_connections(kind="tcp")]
        listening = [socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN]
        assert listening and all(ipaddress.ip_address(each).is_loopback for each in listening), name


def test_every_measured_listener_is_documented() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    table = page.partition("## Listeners")[2].partition("###")[0]
    measured = json.loads((ROOT / "docs" / "measurements" / "listeners.json").read_text())
    for case in measured["cases"].values():
        assert case["state"] == "done"
        for row in case["listeners"]:
            assert row["interface"] == "loopback", row
            assert (
                row["role"].replace("env_server", "environment server").replace("inference", "engine")
                in table
            )
