"""Tokens as arrays from a real engine through the router: the same tokens as vLLM's own route, the same errors."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from primerl_hpc.transport.rollouts.token_arrays import MEDIA_TYPE, decode
from tests.support.helpers import wait_for_async
from tests.support.serving import Serving

pytestmark = pytest.mark.e2e

GENERATE = "/inference/v1/generate"
PROMPT = [1, 5, 103, 40, 41, 42, 2]
ACCEPT = {"Accept": MEDIA_TYPE}
SAMPLING = {"max_tokens": 48, "temperature": 1.0, "seed": 3, "logprobs": 1}


def ask(serving: Serving, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
    return serving.client.post(f"{serving.url('router-0')}{GENERATE}", json=body, headers=headers)


def request(**sampling: Any) -> dict[str, Any]:
    return {"token_ids": PROMPT, "sampling_params": SAMPLING | sampling, "cache_salt": "a"}


@pytest.mark.parametrize(
    "more", [{}, {"ignore_eos": True}, {"stop_token_ids": [40, 41]}, {"stop": ["a", "e"]}]
)
def test_both_routes_return_the_same_tokens_and_log_probabilities(
    serving: Serving, more: dict[str, Any]
) -> None:
    choice = ask(serving, request(**more), {}).json()["choices"][0]
    answer = ask(serving, request(**more), ACCEPT)
    assert (answer.status_code, answer.headers["content-type"]) == (200, MEDIA_TYPE)
    tokens = decode(answer.content)
    assert tokens.token_ids == choice["token_ids"]
    assert tokens.header["finish_reason"] == choice["finish_reason"]
    wanted = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    texts = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert texts == [f"token_id:{token}" for token in choice["token_ids"]]  # which renderers reads
    assert tokens.logprobs == pytest.approx(wanted, abs=1e-5)
    assert answer.headers["x-primerl-policy-version"] == "0"
    if "stop" in more:
        last = AutoTokenizer.from_pretrained(serving.model).decode(tokens.token_ids[-1:])
        assert tokens.header["finish_reason"] == "stop" and set(last) & set("ae")


@pytest.mark.parametrize(
    "body",
    [
        {"token_ids": []} | {"sampling_params": SAMPLING},
        {"token_ids": PROMPT, "sampling_params": SAMPLING | {"temperature": -1.0}},
        {"token_ids": PROMPT, "sampling_params": SAMPLING | {"n": 2}, "model": "another"},
        {"token_ids": PROMPT, "sampling_params": SAMPLING, "model": "another"},
        {"token_ids": [5] * 5000, "sampling_params": SAMPLING},
    ],
)
def test_a_request_that_vllm_refuses_has_vllms_response(serving: Serving, body: dict[str, Any]) -> None:
    plain, arrays = ask(serving, body, {}), ask(serving, body, ACCEPT)
    assert arrays.status_code == plain.status_code >= 400
    assert arrays.headers["content-type"] == plain.headers["content-type"] == "application/json"
    assert arrays.json()["error"]["type"] == plain.json()["error"]["type"]


def test_what_has_no_form_as_arrays_is_json(serving: Serving) -> None:
    answer = ask(serving, request(n=2, seed=None), ACCEPT)
    assert [len(choice["token_ids"]) > 0 for choice in answer.json()["choices"]] == [True, True]


@pytest.mark.parametrize("name", ["router-0", "inference-0"])
def test_the_api_key_is_required(serving: Serving, name: str) -> None:
    url = f"{serving.url(name)}{GENERATE}"
    for key in ({}, {"Authorization": "Bearer wrong"}):
        answer = httpx.post(
            url, json=request(), headers=ACCEPT | key, verify=serving.keys.client_context(), trust_env=False
        )
        assert answer.status_code == 401


def test_a_client_that_disconnects_aborts_its_request(serving: Serving) -> None:
    async def load(client: httpx.AsyncClient) -> int:
        return (await client.get(f"{serving.url('inference-0')}/load")).json()["server_load"]

    async def until(client: httpx.AsyncClient, count: int) -> None:
        async def is_reached() -> bool:
            return await load(client) == count

        await wait_for_async(is_reached, f"{count} requests at the engine")

    async def disconnect() -> None:
        async with serving.async_client() as client:
            url = f"{serving.url('router-0')}{GENERATE}"
            assert serving.post("inference-0", "/pause", {}).status_code == 200
            try:
                waiting = asyncio.ensure_future(client.post(url, json=request(), headers=ACCEPT))
                await until(client, 1)
                waiting.cancel()
                await until(client, 0)
            finally:
                assert serving.post("inference-0", "/resume", {}).status_code == 200

    asyncio.run(disconnect())
