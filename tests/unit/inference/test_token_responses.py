"""Responses in vLLM's formats pass through our route and are parsed by the verifiers client."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Any

import httpx
import numpy as np
import pytest
from renderers.client import _parse_completion_logprobs, parse_generate_response
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from verifiers.v1.graph import _attribute_routed_experts

from primerl_hpc.inference import routes
from primerl_hpc.inference.token_responses import GENERATE
from tests.unit.orchestrator.test_trajectories import prompt, reply, trace


def vllm_form(experts: np.ndarray) -> str:
    """Return the result of ``vllm.utils.serial_utils.numpy2base64``, without importing vLLM, which takes a minute."""
    file = io.BytesIO()
    np.save(file, experts, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode()


def ask(
    experts: np.ndarray | None, body: dict[str, Any], *, logprobs: Any = None, **state: bool
) -> httpx.Response:
    """Return the route's response for ``experts``, after checking that the request reaches vLLM unchanged."""

    async def generate(request: Request) -> JSONResponse:
        assert await request.json() == body
        data = None if experts is None else vllm_form(experts)
        choice = {
            "index": 0,
            "logprobs": logprobs,
            "token_ids": [7, 8],
            "routed_experts": data,
            "sampling_mask": None,
        }
        return JSONResponse({"request_id": "r", "choices": [choice], "usage": {"prompt_tokens": 3}})

    async def go() -> httpx.Response:
        routes.install(routes.EngineState("inference-0", 1, 0, 3, api_key="k", **state))
        app = Starlette(routes=[Route(GENERATE, generate, methods=["POST"])])
        app.add_middleware(routes.EngineRoutes)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            headers = {"Authorization": "Bearer k"}
            return await client.post(GENERATE, json=body, headers=headers)

    return asyncio.run(go())


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_experts_reach_the_messages_of_their_tokens(dtype):
    """Two turns; the second request asks for experts from the last token of the first turn."""
    turns = [prompt([1, 2, 3]), reply([9, 4, 5], 0), prompt([6, 7], 1), reply([9, 8], 2)]
    made = trace(turns)
    every = np.arange(10 * 2 * 2).reshape(10, 2, 2).astype(dtype) + (300 if dtype == np.uint16 else 1)
    first = ask(every[:5], {"token_ids": [1, 2, 3]}, returns_experts=True)
    found = parse_generate_response(first.content)["choices"][0]["routed_experts"]
    _attribute_routed_experts(made, [], [0, 1], 0, found)
    body = {"token_ids": [1, 2, 3], "sampling_params": {"routed_experts_prompt_start": 5}}
    second = ask(every[5:9], body, returns_experts=True)
    assert second.headers["content-length"] == str(len(second.content))
    found = parse_generate_response(second.content)["choices"][0]["routed_experts"]
    _attribute_routed_experts(made, [0, 1], [2, 3], 6, found)
    (branch,) = made.branches
    assert branch.routed_experts.dtype == dtype
    np.testing.assert_array_equal(branch.routed_experts[:9], every[:9])  # nothing follows the last one


def test_responses_without_experts_are_not_rewritten():
    plain = ask(None, {"token_ids": [1]}, returns_experts=True)
    assert plain.json()["choices"][0]["routed_experts"] is None
    theirs = ask(np.zeros((3, 2, 2), np.uint8), {"token_ids": [1]}, returns_experts=False)
    assert isinstance(theirs.json()["choices"][0]["routed_experts"], str)


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("name", [{"token_id": 7}, {"token": "token_id:7"}], ids=["vLLM 0.32", "vLLM 0.31"])
def test_tokens_have_the_texts_that_the_client_expects(name: dict[str, Any], is_on: bool):
    entry = {**name, "logprob": -0.5, "rank": 1}
    content = [{**entry, "top_logprobs": [entry]}, {**entry, "top_logprobs": []}]
    found = ask(
        None, {"token_ids": [1]}, returns_experts=is_on, numbers_tokens=True, logprobs={"content": content}
    )
    choice = parse_generate_response(found.content)["choices"][0]
    assert _parse_completion_logprobs(choice, [7, 7]) == [-0.5, -0.5]
    assert choice["logprobs"]["content"][0]["top_logprobs"][0]["token"] == "token_id:7"
    assert found.headers["content-length"] == str(len(found.content))
