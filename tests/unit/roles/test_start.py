"""Common start of roles: the recipe determines level and format of the log."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.names import Role
from primerl_hpc.observe.merged_logs import stamp_lines
from primerl_hpc.roles.start import RoleProcess, start_role
from tests.support.helpers import TOY_RECIPE, make_plan, process_plan


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, levels = (
        root.handlers[:],
        {name: logging.getLogger(name).level for name in ("primerl_hpc", "verifiers")},
    )
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    logging.captureWarnings(False)


def serve(role: RoleProcess) -> None:
    role.logger.debug("details")
    role.logger.warning("started\nand more")
    logging.getLogger("verifiers.v1.rollout").info("an episode")


@pytest.mark.parametrize(
    ("log", "logged"),
    [
        ({}, ["started"]),
        ({"level": "error", "roles": {"router": "debug"}}, ["details", "started"]),
        ({"level": "error", "verifiers": "debug"}, ["an episode"]),
    ],
)
def test_a_role_logs_at_the_level_of_the_recipe(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], log: dict, logged: list[str]
) -> None:
    make_plan(tmp_path, {**TOY_RECIPE, "log": log}, processes=[process_plan(Role.ROUTER)])
    assert start_role("router", [str(tmp_path), "main", "router-0"], serve) == ExitCode.DONE
    texts = capfd.readouterr().err
    assert [word for word in ("details", "started", "an episode") if word in texts] == logged


def test_json_lines_have_one_line_a_message_and_a_time_that_logs_understands(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = {"json": True, "verifiers": "error"}
    make_plan(tmp_path, {**TOY_RECIPE, "log": log}, processes=[process_plan(Role.ROUTER)])
    start_role("router", [str(tmp_path), "main", "router-0"], serve)
    (line,) = capfd.readouterr().err.splitlines()
    entry = json.loads(line)
    assert (entry["logger"], entry["level"]) == ("primerl_hpc.router", "warning")
    assert entry["text"] == "started\nand more"
    (early,) = stamp_lines([line.replace(entry["time"], "2026-01-01T00:00:01")], 1_800_000_000.0)
    assert early != 1_800_000_000.0
