"""Derived values of layouts."""

from __future__ import annotations

from typing import get_args

from primerl_hpc.plan.predict.layouts import DTYPE_BYTES, Dtype, TrainerSetup


def test_context_parallelism_splits_rows_and_shares_data_groups():
    setup = TrainerSetup(ranks=16, ranks_per_node=8, seq_len=1001, shard=8, replicate=2, context_parallel=4)
    assert setup.row_tokens == 251
    assert setup.data_parallel == 4


def test_each_data_type_has_a_size():
    assert DTYPE_BYTES.keys() == set(get_args(Dtype))
