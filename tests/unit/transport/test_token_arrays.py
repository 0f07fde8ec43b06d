"""Sampled tokens as bytes."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.transport.rollouts.token_arrays import SampledTokens, decode, encode

TOKENS = st.lists(
    st.tuples(st.integers(0, 2**31 - 1), st.floats(-1e4, 0, width=32, allow_subnormal=False)), max_size=50
)


@given(TOKENS, st.dictionaries(st.text(), st.none() | st.integers() | st.text()))
def test_every_response_is_read_as_it_was_written(tokens, header):
    written = SampledTokens([token for token, _ in tokens], [logprob for _, logprob in tokens], header)
    assert decode(encode(written)) == written


def test_the_bytes_are_those_of_the_documentation():
    header = json.dumps({"finish_reason": "stop"}, separators=(",", ":")).encode()
    body = struct.pack("<I", len(header)) + header + struct.pack("<2i2f", 5, 70_000, -0.5, -2.25)
    tokens = SampledTokens([5, 70_000], [-0.5, -2.25], {"finish_reason": "stop"})
    assert encode(tokens) == body
    assert decode(body) == tokens


@given(st.binary(max_size=64))
def test_other_bytes_are_refused_or_read_but_never_fail_otherwise(body):
    try:
        tokens = decode(body)
    except ValueError:
        return
    assert len(tokens.token_ids) == len(tokens.logprobs)


@pytest.mark.parametrize("cut", [1, 3, 4, 9])
def test_an_incomplete_response_is_refused(cut):
    body = encode(SampledTokens([1, 2, 3], [-1.0, -2.0, -3.0], {"request_id": "a"}))
    with pytest.raises(ValueError):
        decode(body[:-cut])


def test_as_many_log_probabilities_as_tokens_are_required():
    with pytest.raises(ValueError, match="2 tokens but 1 log-probabilities"):
        encode(SampledTokens([1, 2], [-1.0]))
