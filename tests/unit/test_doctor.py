"""`doctor`: what sinfo says is compared with what the profile claims (the rest is asked of a real SLURM in tests/slurm)."""

from __future__ import annotations

from pathlib import Path

import pytest

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.slurm import SEPARATOR
from primerl_hpc.launch.doctor import examine


@pytest.fixture(autouse=True)
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sbatch", "srun", "squeue", "scancel", "scontrol"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.parametrize(
    "limits, is_good, said",
    [
        (("1:00:00", "1-00:00:00"), True, "of at most 1-00:00:00"),
        (("8:00:00", "1:00:00"), False, "of at most 8:00:00"),
        (("infinite", "1:00:00"), None, ""),
    ],
)
def test_a_walltime_fits_when_any_of_several_partitions_takes_it(
    limits: tuple[str, ...], is_good: bool | None, said: str
) -> None:
    names = ["gpu", "long"]
    rows = [
        SEPARATOR.join([name, "up", limit, "4", "gpu:8", "64"])
        for name, limit in zip(names, limits, strict=True)
    ]
    scheduler = {"partition": ",".join(names), "time": "12:00:00"}
    profile = Profile.model_validate({"name": "site", "nodes": 2, "scheduler": scheduler})
    asked = lambda command: "\n".join(rows) if "--format" in command[-1] else ""  # noqa: E731
    found = [each for each in examine(profile, asked) if each.what == "walltime"]
    assert [each.is_ok for each in found] == ([] if is_good is None else [is_good])
    assert all(said in each.said for each in found)


def test_what_a_profile_says_of_its_site_is_told_first() -> None:
    profile = load_profile("lumi").profile
    first = next(iter(examine(profile, lambda command: "")))
    assert first.is_ok and first.what == "profile"
    for word in (
        "8 × MI250X-GCD, 64 GiB each",
        "480 GiB",
        "verified: never on the machine",
        profile.docs_url,
    ):
        assert word in first.said
