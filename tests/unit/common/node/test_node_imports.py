"""Garbage collections while large libraries are imported."""

from __future__ import annotations

import gc

import pytest

from primerl_hpc.common.node.imports import without_collections


def test_collections_continue_after_an_import_that_fails() -> None:
    assert gc.isenabled()
    with pytest.raises(ImportError), without_collections():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
