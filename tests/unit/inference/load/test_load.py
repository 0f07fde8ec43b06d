"""Load on engines: times of streamed tokens, closed and open loops, and what their figures mean."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from primerl_hpc.inference.load.client import LoadClient, note_data
from primerl_hpc.inference.load.levels import draw_requests, measure_levels, run_closed, run_open
from primerl_hpc.inference.load.timing import RequestTimes, summarize_engines, summarize_requests
from primerl_hpc.plan.bench_plans import TOKEN_IDS, LoadRequest
from tests.support.api import Request, serve
from tests.support.helpers import PATIENCE_S


def part(*token_ids: int) -> bytes:
    return b'data: {"choices": [{"text": "", "token_ids": %s}]}\n\n' % str(list(token_ids)).encode()


def test_tokens_that_arrive_together_share_the_time_since_the_previous_ones() -> None:
    times = RequestTimes(num_prompt=3, sent_s=10.0)
    rest = note_data(times, part(1) + part(2)[:20], 10.5)
    rest = note_data(times, rest + part(2)[20:] + part(3), 11.5)
    assert note_data(times, rest + b"data: [DONE]\n\n", 12.0) == b""
    assert times.arrivals == [(10.5, 1), (11.5, 2)]
    assert (times.ttft_s, times.latency_s, times.tpot_s) == (0.5, 1.5, 0.5)
    assert times.itls_s() == [0.5, 0.5]


def test_rates_count_complete_requests_from_the_first_start_to_the_last_token() -> None:
    done = [RequestTimes(10, 0.0, [(1.0, 1), (3.0, 4)]), RequestTimes(30, 1.0, [(2.0, 5)])]
    found = summarize_requests([*done, RequestTimes(50, 0.5, [(0.6, 1)], "connection reset")])
    assert (found["requests"], found["failed"], found["error"]) == (3, 1, "connection reset")
    assert (found["duration_s"], found["output_tokens"], found["prompt_tokens"]) == (3.0, 10, 40)
    assert found["output_tokens_per_s"] == pytest.approx(10 / 3)
    assert found["tokens_per_s"] == pytest.approx(50 / 3)
    assert found["ttft_s"] == {"mean": 1.0, "median": 1.0, "p90": 1.0, "p99": 1.0, "max": 1.0}
    assert found["itl_s"]["max"] == 0.5 and found["tpot_s"]["mean"] == 0.5
    assert "duration_s" not in summarize_requests([RequestTimes(1, 0.0, error="refused")])


def test_the_kv_cache_of_the_fullest_engine_and_the_requests_of_all_engines_are_reported() -> None:
    looks = [
        {"inference-0": {"kv_usage": 0.1, "running": 2.0, "waiting": 0.0, "preemptions": 5.0}},
        {},
        {
            "inference-0": {"kv_usage": 0.2, "running": 2.0, "waiting": 1.0, "preemptions": 6.0},
            "inference-1": {"kv_usage": 0.6, "running": 4.0, "waiting": 0.0, "preemptions": 0.0},
        },
    ]
    found = summarize_engines(looks)
    assert found["kv_use"] == {"mean": pytest.approx(0.3), "max": 0.6}
    assert found["running"] == {"mean": 4.0, "max": 6.0}
    assert found["preemptions"] == 1.0


class Server:
    """Responds after three turns of the event loop; records how many requests were in flight."""

    def __init__(self) -> None:
        self.in_flight = self.most = 0

    async def send(self, prompt: list[int], num_output: int) -> RequestTimes:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        for _ in range(3):
            await asyncio.sleep(0)
        self.in_flight -= 1
        return RequestTimes(len(prompt), 0.0, [(1.0, num_output)])


def test_a_closed_loop_never_has_more_requests_in_flight_than_its_concurrency() -> None:
    server, request = Server(), LoadRequest(prompt_tokens="2-5", output_tokens="3")
    done = asyncio.run(run_closed(draw_requests(request, 20, seed=1), server.send, 4))
    assert (len(done), server.most) == (20, 4)


def test_an_open_loop_starts_requests_although_none_has_ended() -> None:
    work = draw_requests(LoadRequest(prompt_tokens="2", output_tokens="1"), 5, seed=1)

    async def run() -> int:
        everybody, started = asyncio.Event(), 0

        async def send(prompt: list[int], num_output: int) -> RequestTimes:
            nonlocal started
            started += 1
            if started == len(work):
                everybody.set()
            await everybody.wait()
            return RequestTimes(len(prompt), 0.0, [(1.0, num_output)])

        return len(await asyncio.wait_for(run_open(work, send, rate=1000.0, seed=1), PATIENCE_S))

    assert asyncio.run(run()) == 5


def test_prompts_have_the_requested_lengths_and_no_common_prefix() -> None:
    request = LoadRequest(prompt_tokens="20,30", output_tokens="4-6")
    work = draw_requests(request, 8, seed=3)
    assert [len(prompt) for prompt, _ in work] == [20, 30] * 4
    assert all(set(prompt) <= set(TOKEN_IDS) for prompt, _ in work)
    assert len({tuple(prompt[:16]) for prompt, _ in work}) == 8
    assert {output for _, output in work} <= {4, 5, 6}
    assert work == draw_requests(request, 8, seed=3) != draw_requests(request, 8, seed=4)


def test_levels_run_one_after_another_first_closed_then_open() -> None:
    request = LoadRequest(
        prompt_tokens="2", output_tokens="1", concurrency=(1, 2), rates=(500.0,), requests=3
    )
    server, reported = Server(), []

    async def look() -> dict[str, dict[str, float]]:
        return {"inference-0": {"kv_usage": 0.5}}

    levels = asyncio.run(measure_levels(request, server.send, look, reported.append))
    assert reported == levels
    assert [(level["loop"], level.get("concurrency", level.get("rate"))) for level in levels] == [
        ("closed", 1),
        ("closed", 2),
        ("open", 500.0),
    ]
    assert all(level["requests"] == 3 and level["kv_use"]["max"] == 0.5 for level in levels)


@pytest.mark.parametrize(
    ("status", "expected"), [(503, "HTTP 503: "), (200, "0 of 4 tokens arrived")], ids=["refused", "short"]
)
def test_a_refused_or_short_response_is_a_failed_request_with_its_reason(status: int, expected: str) -> None:
    def answer(request: Request) -> tuple[int, Any]:
        assert request.body["ignore_eos"] and request.body["max_tokens"] == 4
        return status, {"choices": []}

    async def run(url: str) -> RequestTimes:
        async with aiohttp.ClientSession() as session:
            return await LoadClient(session, url, "m").request([5, 6], 4)

    with serve(answer) as url:
        times = asyncio.run(run(url))
    assert times.error is not None and times.error.startswith(expected)
