"""Two real engines, one for prefill and one for decoding: NIXL transfers the KV blocks, and no request fails when the
prefill engine is killed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from primerl_hpc.common.names import Role
from primerl_hpc.common.waiting import wait_until
from primerl_hpc.orchestrator.engines.fleet import Fleet, FleetOptions
from tests.security.test_stores import ZMQ_GREETING, answers_to_a_stranger, listeners
from tests.support.helpers import PATIENCE_S
from tests.support.serving import Serving, hf_logprobs, save_variant
from tests.support.stranger import as_stranger

pytest.importorskip(
    "nixl", reason="the package nixl (extra prefill), which transfers KV blocks, is not installed"
)
pytestmark = pytest.mark.e2e

DECODES, PREFILLS = "inference-0", "prefill-0"
PROMPT = [5 + 7 * place % 90 for place in range(300)]  # three blocks of the CPU engine, the last one begun


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("prefill")
    system = Serving(folder, Role.INFERENCE, Role.PREFILL, Role.ROUTER, layout={"prefill": {}})
    try:
        system.start(DECODES, PREFILLS, "router-0")
        system.wait_for_router()
        yield system
    finally:
        system.stop()


def prompt(first: int) -> list[int]:
    """Return a prompt that no cache contains."""
    return [first, *PROMPT[1:]]


def metrics(serving: Serving, name: str = DECODES) -> str:
    return serving.client.get(f"{serving.url(name)}/metrics").text


def count(text: str, line: str) -> float:
    found = re.search(rf"^{re.escape(line)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def prefills(serving: Serving) -> tuple[float, float]:
    """Numbers of prompts that were prefilled by the other engine and by the decoding engine."""
    text = metrics(serving)
    return count(text, 'primerl_prefill_total{by="other"}'), count(text, 'primerl_prefill_total{by="self"}')


def pulled_tokens(serving: Serving) -> float:
    lines = [line for line in metrics(serving).splitlines() if 'source="external_kv_transfer"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if "_total" in line)


def is_empty(serving: Serving) -> bool:
    """True if the prefill engine holds no blocks for other engines after a further request."""
    serving.generate([7, 8], 1, name=PREFILLS)
    usage = re.findall(r"^vllm:kv_cache_usage_perc\{.*\} (\S+)$", metrics(serving, PREFILLS), re.MULTILINE)
    return [float(each) for each in usage] == [0.0]


def is_of(model: Path, asked: list[int], generated: dict) -> bool:
    expected = hf_logprobs(model, asked, generated["token_ids"])
    return generated["logprobs"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_the_decode_engine_pulls_the_kv_blocks_and_samples_as_transformers_does(serving: Serving) -> None:
    others, own = prefills(serving)
    before = pulled_tokens(serving)
    generated = serving.generate(PROMPT)
    assert len(generated["token_ids"]) == 16 and is_of(serving.model, PROMPT, generated)
    assert prefills(serving) == (others + 1, own)
    assert pulled_tokens(serving) == before + len(PROMPT)
    engines = serving.get("router-0", "/primerl/engines")["engines"]
    assert engines == [serving.url(DECODES)]


@pytest.mark.slow
def test_chat_streams_and_text_prompts_are_prefilled_remotely_too(serving: Serving) -> None:
    others, own = prefills(serving)
    body = {
        "model": serving.recipe.model.name,
        "messages": [{"role": "user", "content": "abc" * 60}],
        "max_tokens": 4,
    }
    whole = serving.post("router-0", "/v1/chat/completions", body | {"temperature": 0}).json()
    assert whole["usage"]["completion_tokens"] == 4
    stream = serving.post("router-0", "/v1/chat/completions", body | {"temperature": 0, "stream": True}).text
    parts = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    said = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)
    assert said == whole["choices"][0]["message"]["content"]
    text = {"model": serving.recipe.model.name, "prompt": "cba" * 60, "max_tokens": 3}
    assert serving.post("router-0", "/v1/completions", text).json()["usage"]["completion_tokens"] == 3
    assert prefills(serving) == (others + 3, own)


@pytest.mark.slow
def test_an_update_reaches_both_engines_and_later_blocks_are_of_the_new_version(
    serving: Serving, tmp_path: Path
) -> None:
    variant = save_variant(serving.model, serving.room(tmp_path) / "model", seed=7)

    async def update(model: Path, version: int) -> dict[str, int | None]:
        fleet = Fleet(serving.run, serving.keys, FleetOptions(backoff_s=0.05))
        try:
            report = await fleet.update(model, version)
            assert report.is_served and not report.failed, report
            return await fleet.versions()
        finally:
            await fleet.close()

    assert asyncio.run(update(variant, 3)) == {DECODES: 3, PREFILLS: 3}
    others, own = prefills(serving)
    generated = serving.generate(PROMPT)
    assert is_of(variant, PROMPT, generated) and not is_of(serving.model, PROMPT, generated)
    assert prefills(serving) == (others + 1, own)
    serving.post(PREFILLS, "/update_weights", {"path": str(serving.model), "version": 0}).raise_for_status()
    assert is_of(variant, prompt(9), serving.generate(prompt(9)))  # blocks of another version are not used
    assert prefills(serving) == (others + 1, own + 1)
    assert asyncio.run(update(serving.model, 0)) == {DECODES: 0, PREFILLS: 0}
    wait_until(lambda: is_empty(serving), what="the blocks to be given back", timeout_s=PATIENCE_S)


@pytest.mark.slow
def test_engines_listen_on_loopback_and_a_stranger_who_ends_the_exchange_of_metadata_fails_no_request(
    serving: Serving,
) -> None:
    """The exchange has no authentication (docs/security.md): its thread in vLLM ends at a malformed message."""
    for name in (DECODES, PREFILLS):
        tcp, _ = listeners(serving.processes[name].pid)
        assert tcp and {address for address, _ in tcp} == {"127.0.0.1"}, (name, tcp)
    answers = answers_to_a_stranger({port for _, port in listeners(serving.processes[PREFILLS].pid)[0]})
    (port,) = [port for port, answer in answers.items() if answer.startswith(ZMQ_GREETING)]

    def disturb() -> None:
        with zmq.Context() as context, context.socket(zmq.REQ) as channel:
            channel.connect(f"tcp://127.0.0.1:{port}")
            channel.send(b"\xc1")  # no value of msgpack

    as_stranger(disturb)
    wait_until(
        lambda: "nixl_handshake_listener" in serving.log(PREFILLS), what="the end", timeout_s=PATIENCE_S
    )
    assert is_of(serving.model, prompt(40), serving.generate(prompt(40)))


@pytest.mark.slow
def test_a_killed_prefill_engine_fails_no_request(serving: Serving) -> None:
    others, own = prefills(serving)
    with ThreadPoolExecutor(8) as pool:
        asked = [prompt(first) for first in range(10, 34)]
        answers = [pool.submit(serving.generate, each, 8) for each in asked]
        answers[2].result()
        serving.kill(PREFILLS)
        generated = [answer.result() for answer in answers]
    assert all(len(each["token_ids"]) == 8 for each in generated)
    assert is_of(serving.model, asked[0], generated[0]) and is_of(serving.model, asked[-1], generated[-1])
    now = prefills(serving)
    assert now[0] > others and now[1] > own and sum(now) == others + own + len(asked)
    assert "prefilling locally" in serving.log(DECODES)
