"""The router's workers are the engines that are there, no more and no fewer."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.common.files import write_json
from primerl_hpc.common.listen import bind_listener
from primerl_hpc.common.rundir import RunDir, publish_endpoint
from primerl_hpc.roles.router import plan_membership, published_engines, router_command

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


def test_the_router_keeps_a_session_on_one_engine_and_knows_no_key() -> None:
    command = router_command("127.0.0.1", 1234, 1235)
    assert command[command.index("--policy") + 1] == "consistent_hash"
    assert not any("key" in part for part in command)


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
