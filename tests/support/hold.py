"""Hold a run at a step until the test has acted: a fast run would otherwise end before a slow test reads its state.

    hold = Hold(work / "runs" / "killed", after=5)
    run = start("killed", hold.environment, *hold.variables)
    wait_in_run(run, lambda: last_step(run) >= 5, "step 5")    # and at most 5 + max_off_policy_steps
    hold.move(after=9); hold.end()

No rollout begins after the trainer's step ``after``; those that began before can fill ``max_off_policy_steps`` batches.

    hold = Hold(work / "runs" / "colocated", after=5, turn=3)
    run = start("colocated", hold.environment, hold.loss, *hold.variables)
    hold.wait_for_turn(); hold.end_turn()

A trainer that shares its accelerator does not end its turn ``turn``. Turn 1 builds the model, turn 2 is the first step.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from primerl_hpc.common.files import write_text
from primerl_hpc.common.names import Role, process_name
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.turns import read_grant
from tests.support.helpers import ROOT
from tests.support.runs import wait_in_run


class Hold:
    """``environment``, ``loss`` and ``variables`` change the run's recipe, as ``submit --set`` accepts them."""

    environment = "environments.train=[{id: held-reverse-text}]"
    loss = "loss={type: custom, import_path: 'held_loss:held_dppo'}"

    def __init__(self, root: Path, *, after: int, turn: int | None = None) -> None:
        """``root``: the run directory, which need not exist. The files lie next to it."""
        self.run, self.turn = RunDir(root), turn
        folder = root.with_name(f"{root.name}-held")
        folder.mkdir(parents=True)
        for name in ("held_reverse_text.py", "held_loss.py"):
            shutil.copy(ROOT / "tests" / "support" / name, folder)
        self._after, self._turn = folder / "after", folder / "turn"
        values = {
            "PYTHONPATH": folder,
            "HOLD_FILE": self._after,
            "HOLD_METRICS": self.run.metrics("trainer"),
            "HOLD_TURN_FILE": self._turn,
            "HOLD_TURN_REQUEST": self.run.turn(process_name(Role.TRAINER, 0)),
        }
        self.variables = tuple(f"env.{name}={value}" for name, value in values.items())
        self.move(after)
        if turn is not None:
            write_text(self._turn, str(turn))

    def move(self, after: int) -> None:
        write_text(self._after, str(after))

    def end(self) -> None:
        self._after.unlink()

    def wait_for_turn(self) -> None:
        """Wait until the trainer has its turn ``turn``, which it does not end."""
        expected = (0, self.turn)
        wait_in_run(
            self.run,
            lambda: (grant := read_grant(self.run)) is not None and grant.trainer == expected,
            f"turn {self.turn} of the trainer",
        )

    def end_turn(self) -> None:
        self._turn.unlink()
