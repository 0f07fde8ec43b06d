"""Requests that are served as arrays, and those that are left to vLLM."""

from __future__ import annotations

import json

import pytest

from primerl_hpc.inference.token_route import array_request

BODY = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4, "logprobs": 1}}


def read(body: object) -> dict | None:
    return array_request(json.dumps(body).encode())


def test_only_the_sampled_tokens_log_probability_is_computed_and_nothing_is_turned_into_text():
    assert read(BODY) == {
        "token_ids": [1, 2],
        "sampling_params": {"max_tokens": 4, "logprobs": 0, "detokenize": False},
    }


def test_stop_strings_are_found_in_text():
    body = BODY | {"sampling_params": {"stop": ["</answer>"]}}
    assert read(body)["sampling_params"] == {"stop": ["</answer>"], "logprobs": 0, "detokenize": True}


@pytest.mark.parametrize(
    "body",
    [
        None,
        [1],
        {"token_ids": [1]},
        {"token_ids": [1], "sampling_params": None},
        BODY | {"stream": True},
        BODY | {"return_token_ids": True},
        BODY | {"features": {"mm_hashes": {}}},
        BODY | {"content_parts": [{"type": "image_url"}]},
        BODY | {"sampling_params": {"n": 2}},
        BODY | {"sampling_params": {"prompt_logprobs": 0}},
    ],
)
def test_other_requests_are_vllms(body):
    assert read(body) is None


def test_a_body_that_is_not_json_is_vllms():
    assert array_request(b"{") is None
    assert array_request(b"\xff") is None
