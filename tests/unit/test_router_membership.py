"""The router's workers are the engines that are there, no more and no fewer."""

from __future__ import annotations

import contextlib
import logging
import random
import subprocess
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.common.files import wait_until, write_json
from primerl_hpc.common.listen import bind_listener, free_port
from primerl_hpc.common.names import Role
from primerl_hpc.common.rundir import RunDir, publish_endpoint
from primerl_hpc.recipe.schema import Recipe
from primerl_hpc.roles.router import Keeper, plan_membership, published_engines, router_command
from primerl_hpc.roles.start import RoleProcess
from tests.api import Request, serve
from tests.support import make_plan, process_plan

RECIPE = {"kind": "inference", "name": "x", "model": {"name": "m"}}
urls = st.sets(st.sampled_from([f"http://h:{port}" for port in range(6)]))


@given(workers=urls, healthy=urls, published=urls)
def test_after_a_change_the_workers_are_published_and_no_healthy_engine_is_left_out(
    workers, healthy, published
):
    change = plan_membership(workers, healthy, published)
    after = (workers | set(change.add)) - set(change.remove)
    assert after <= published
    assert (published & healthy) <= after
    assert not set(change.add) & set(change.remove)


@given(workers=urls, healthy=urls, published=urls)
def test_a_second_look_changes_nothing(workers, healthy, published):
    change = plan_membership(workers, healthy, published)
    after = (workers | set(change.add)) - set(change.remove)
    again = plan_membership(after, healthy, published)
    assert (again.add, again.remove) == ((), ())


@given(workers=urls)
def test_a_worker_that_is_slow_for_a_moment_stays(workers):
    assert plan_membership(workers, healthy=(), published=workers).remove == ()


def test_an_engine_whose_restart_was_asked_for_gets_no_requests(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    publish_endpoint(run, "inference-0", "http://h:1")
    publish_endpoint(run, "inference-1", "http://h:2")
    publish_endpoint(run, "router-0", "http://h:3")
    assert published_engines(run) == ["http://h:1", "http://h:2"]
    write_json(run.restart_request("inference-0"), {"reason": "does not take new weights"})
    assert published_engines(run) == ["http://h:2"]


@pytest.mark.parametrize(
    "state, joins",
    [
        ((200, {"version": 3}), True),
        ((200, {"version": 2}), False),
        ((401, {"error": "key"}), False),
        ((200, []), False),
        ((200, {}), False),
    ],
)
def test_only_an_engine_that_vouches_for_the_live_version_gets_requests_and_a_stranger_ends_nothing(
    tmp_path: Path, state: tuple[int, object], joins: bool
) -> None:
    paths = []

    def answer(request: Request) -> tuple[int, object]:
        path = request.path.partition("?")[0]
        paths.append(path)
        return state if path == "/primerl/state" else (200, {"urls": []})

    plan = make_plan(tmp_path, RECIPE, processes=[process_plan(Role.ROUTER)])
    run = RunDir(tmp_path)
    role = RoleProcess(run, plan, plan.phases[0], "router-0", logging.getLogger("router"))
    with serve(answer) as url, subprocess.Popen(["true"]) as child:
        publish_endpoint(run, "inference-0", url)
        write_json(run.live_version, {"version": 3})
        keeper = Keeper(role, url, child)
        keeper.reconcile()
        assert ("/add_worker" in paths) == joins and "/primerl/state" in paths
        run.endpoint("inference-1").mkdir()  # to read it is an OSError
        keeper.reconcile()
        assert keeper.patience.is_tried
        run.endpoint("inference-1").rmdir()
        keeper.reconcile()
        assert not keeper.patience.is_tried


GROUPS, GROUP_SIZE, TURNS = 12, 4, 3


@contextlib.contextmanager
def real_router(urls: Iterable[str], routing: str = "prefix") -> Iterator[httpx.Client]:
    """A client of a router in front of ``urls``."""
    port, metrics_port = free_port("127.0.0.1"), free_port("127.0.0.1")
    recipe = Recipe.model_validate(
        {
            "kind": "inference",
            "name": "x",
            "model": {"name": "m"},
            "layout": {"inference": {"routing": routing}},
            "rollouts": {"group_size": GROUPS, "batch_size": GROUPS},  # no load here is uneven enough
        }
    )
    command = router_command("127.0.0.1", port, metrics_port, recipe)
    assert not any("key" in part for part in command)
    with (
        subprocess.Popen(command, stdout=subprocess.DEVNULL) as router,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client,
    ):

        def is_up() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return client.get("/list_workers").is_success
            return False

        try:
            wait_until(is_up, what="the router", timeout_s=60)
            for url in urls:
                client.post("/add_worker", params={"url": url}).raise_for_status()
            yield client
        finally:
            router.kill()


def generate(client: httpx.Client, tokens: list[int], rollout: str = "0.0") -> httpx.Response:
    body = {"model": "m", "token_ids": tokens, "sampling_params": {"max_tokens": 1}}
    return client.post("/inference/v1/generate", json=body, headers={"X-Session-ID": rollout})


def test_an_engine_that_fails_some_requests_stays_open_for_the_others() -> None:
    def answer(request: Request) -> tuple[int, object]:
        return (500 if request.body.get("token_ids") == [6] else 200), {"data": []}

    with serve(answer) as url, real_router([url]) as client:
        assert [generate(client, [6]).status_code for _ in range(4)] == [500] * 4  # each is tried five times
        assert generate(client, [7]).status_code == 200


class Engines:
    """Two stand-ins behind a real router; they note who asked them, and answer the first rollouts of all groups together."""

    def __init__(self, stack: contextlib.ExitStack, routing: str) -> None:
        self.asked: list[set[str]] = [set(), set()]
        self.all_have_begun = threading.Barrier(GROUPS)
        urls = [stack.enter_context(serve(partial(self.answer, mine))) for mine in self.asked]
        self.client = stack.enter_context(real_router(urls, routing))

    def answer(self, mine: set[str], request: Request) -> tuple[int, object]:
        rollout = request.headers.get("x-session-id")
        if rollout is not None:
            if rollout.endswith(".0") and rollout not in mine:
                self.all_have_begun.wait(60)
            mine.add(rollout)
        return 200, {"data": [], "choices": []}

    def play(self, rollout: str, prompt: list[int]) -> None:
        tokens = list(prompt)
        for turn in range(TURNS):
            generate(self.client, tokens, rollout).raise_for_status()
            tokens += [turn] * 50


@pytest.mark.parametrize("routing", ["prefix", "session"])
def test_the_turns_of_a_rollout_meet_at_one_engine_and_by_prefix_the_rollouts_of_a_group_too(routing) -> None:
    pick = random.Random(0)
    prompts = [pick.choices(range(50_000), k=200) for _ in range(GROUPS)]
    with contextlib.ExitStack() as stack:
        engines = Engines(stack, routing)
        pool = stack.enter_context(ThreadPoolExecutor(GROUPS))
        for member in range(GROUP_SIZE):
            rollouts = [f"{group}.{member}" for group in range(GROUPS)]
            list(pool.map(engines.play, rollouts, prompts))
    first, second = engines.asked
    assert len(first | second) == GROUPS * GROUP_SIZE and not first & second
    groups = [{rollout.split(".")[0] for rollout in asked} for asked in engines.asked]
    assert bool(groups[0] & groups[1]) == (routing == "session")
    assert min(map(len, groups)) >= GROUPS / 4


def test_a_process_takes_its_old_port_again_and_another_where_it_is_taken(tmp_path: Path) -> None:
    memory = tmp_path / "inference-0.json"
    first = bind_listener("127.0.0.1", memory)
    port = first.getsockname()[1]
    first.close()
    again = bind_listener("127.0.0.1", memory)
    assert again.getsockname()[1] == port
    again.listen()
    other = bind_listener("127.0.0.1", memory)
    assert other.getsockname()[1] != port
    for listener in (again, other):
        listener.close()
