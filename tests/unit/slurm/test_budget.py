"""GPU-hours left for an account, from the output of sshare."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.slurm.budget import Budget, gpu_budget, parse_budget

TREE = """\
root|||cpu=900,gres/gpu=700
 root|root||cpu=0,gres/gpu=0
 top||gres/gpu={top}|cpu=0,gres/gpu=600
  lab||cpu=100,gres/gpu={lab}|cpu=0,gres/gpu=60
   lab|ada|{user}|cpu=0,gres/gpu=30
  other||gres/gpu=1|gres/gpu=1
"""
"""Output of SLURM 23.11 on the virtual cluster, with other numbers."""


def tree(top: str = "6000", lab: str = "6000", user: str = "") -> str:
    return TREE.format(top=top, lab=lab, user=user)


def test_the_limit_with_the_least_left_counts_on_the_account_its_parents_or_the_user() -> None:
    assert parse_budget(tree(), "lab") == Budget("lab", "top", 100.0, 10.0)
    assert parse_budget(tree(top="60000"), "lab") == Budget("lab", "lab", 100.0, 1.0)
    assert parse_budget(tree(user="gres/gpu=90"), "lab") == Budget("lab", "ada", 1.5, 0.5)


def test_a_budget_is_never_below_zero() -> None:
    found = parse_budget(tree(top="120"), "lab")
    assert found is not None and found.remaining_hours == 0


def test_the_account_of_a_user_with_one_account_needs_no_name() -> None:
    text = "\n".join(line for line in tree().splitlines() if "root|root" not in line)
    assert parse_budget(text, None) == parse_budget(text, "lab")
    assert parse_budget(tree(), None) is None  # two accounts


@pytest.mark.parametrize("text", ["", "lab||cpu=100|cpu=1", "lab||gres/gpu=many|gres/gpu=1", "no table"])
def test_output_without_a_limit_of_gpus_has_no_budget(text: str) -> None:
    assert parse_budget(text, "lab") is None


@given(st.text(alphabet="ab =,|/gpures\n019.", max_size=80), st.sampled_from([None, "a", "lab"]))
def test_any_output_is_parsed(text: str, account: str | None) -> None:
    found = parse_budget(text, account)
    assert found is None or found.remaining_hours >= 0


def test_without_sshare_there_is_no_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_budget("lab", timeout_s=5) is None
