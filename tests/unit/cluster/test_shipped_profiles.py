"""The shipped profiles of real sites: sources, protection from corrupted sums, and the table of what they express."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.assets import list_assets
from primerl_hpc.common.validate import all_paths
from tests.support.helpers import ROOT
from tools.site_keys import NEEDS, rows, table

GENERIC = {"a100x32", "h100x1024", "h100x64", "h100x64-pyxis", "h200x8", "local", "virtual"}
SITES = sorted({name.removesuffix(".yaml") for name in list_assets("cluster_profiles")} - GENERIC)


@pytest.mark.parametrize("name", SITES)
def test_a_profile_of_a_site_names_its_sources_their_dates_and_what_is_unverified(name: str) -> None:
    text = (ROOT / "cluster_profiles" / f"{name}.yaml").read_text()
    head = text[: text.index("\nname: ")]
    assert re.search(r"^# Sources?: \[1\]", head, re.M) and "Unverified:" in head, name
    assert re.search(r"20\d\d-\d\d", head), "no date of a source"
    assert "never on the machine; written 20" in text
    comments = re.findall(r"(?:^|\s)#(.*)", text)
    assert all(f"[{number}]" in head for line in comments for number in re.findall(r"\[(\d)[,\]]", line))


def test_every_gh200_profile_excludes_the_protocol_that_corrupts_sums() -> None:
    grace = [name for name in SITES if load_profile(name).profile.node.is_grace_hopper]
    assert {"clariden", "jupiter", "vista", "deltaai", "isambard-ai"} <= set(grace)
    for name in grace:
        profile = load_profile(name).profile
        assert profile.network.env["NCCL_PROTO"] == "^LL128" and profile.node.arch == "aarch64", name


@pytest.mark.parametrize("name", SITES)
def test_every_variant_of_a_site_is_valid_and_within_its_limits(name: str) -> None:
    for variant in load_profile(name).profile.variants:
        assert load_profile(name, variant=variant).profile.name == name


def test_the_table_of_sites_and_keys_is_as_recorded(request: pytest.FixtureRequest) -> None:
    page = Path(ROOT / "docs" / "site-keys.md")
    if request.config.getoption("--update-golden"):
        page.write_text(table())
    assert set(NEEDS) == set(SITES)
    assert {key for keys in NEEDS.values() for key in keys} <= set(all_paths(Profile))
    assert all(now >= before for _, _, before, now, _ in rows()) and page.read_text() == table()
