"""Turns: who may use the accelerators that engines and trainer share (``layout.colocated`` in mode ``sleep``).

    control/turns/trainer-0.json     request of the trainer: {"attempt", "incarnation", "number", "is_released"}
    control/turns/inference-0.json   request of an engine that starts, in the same form
    control/turns/grant.json         the orchestrator: {"attempt", "trainer": [incarnation, number] or null, "engines"}

The orchestrator alone decides (`orchestrator.engines.turns`), so that no decision depends on how soon a shared
filesystem shows a file: a process uses the accelerators only after it has read a grant with its own incarnation. The
trainer asks for each turn and reports its end. An engine asks once, before it starts vLLM; afterwards it is put to
sleep and woken by requests to its routes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from primerl_hpc.common.files import read_json_or_none, write_json
from primerl_hpc.run.rundir import RunDir


@dataclass(frozen=True)
class TurnRequest:
    """Request of one incarnation of a process."""

    attempt: int
    incarnation: int
    number: int = 1
    """Counts the turns of this incarnation."""
    is_released: bool = False
    """True when the turn is over: the process no longer uses the accelerators."""


@dataclass(frozen=True)
class Grant:
    """The processes that may use the accelerators."""

    attempt: int
    trainer: tuple[int, int] | None = None
    """Incarnation and turn of the trainer that has the accelerators; None: the engines have them."""
    engines: Mapping[str, int] = field(default_factory=dict)
    """Incarnation of every engine that was allowed to start, by process. While the trainer has its turn, they sleep or
    have exited."""

    def admits_trainer(self, request: TurnRequest) -> bool:
        """True if this is the grant of the trainer's request."""
        return self.attempt == request.attempt and self.trainer == (request.incarnation, request.number)

    def admits_engine(self, process: str, request: TurnRequest) -> bool:
        """True if this engine may start."""
        is_listed = self.attempt == request.attempt and self.engines.get(process) == request.incarnation
        return is_listed and self.trainer is None


def write_request(run: RunDir, process: str, request: TurnRequest) -> None:
    write_json(run.turn(process), asdict(request))


def read_request(run: RunDir, process: str, attempt: int) -> TurnRequest | None:
    """Return the last request of a process in this attempt; None without one."""
    found = read_json_or_none(run.turn(process))
    request = _request(found) if isinstance(found, dict) else None
    return request if request is not None and request.attempt == attempt else None


def _request(content: dict[str, Any]) -> TurnRequest | None:
    try:
        return TurnRequest(**content)
    except TypeError:  # written by another version
        return None


def write_grant(run: RunDir, grant: Grant) -> None:
    write_json(run.turn_grant, asdict(grant))


def read_grant(run: RunDir) -> Grant | None:
    """Return the grant that is in force; None before the first one."""
    found = read_json_or_none(run.turn_grant)
    if not isinstance(found, dict):
        return None
    trainer = found.get("trainer")
    return Grant(
        int(found.get("attempt", 0)),
        (int(trainer[0]), int(trainer[1])) if trainer else None,
        {str(name): int(number) for name, number in dict(found.get("engines", {})).items()},
    )
