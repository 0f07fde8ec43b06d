"""Selection of the engine for a request: sessions stay, prefixes share an engine, and load stays balanced."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.inference.balancing import BLOCK_BYTES, Balancer, prompt_blocks

ENGINES = [f"https://h:{port}" for port in range(4)]


def generate(tokens: list[int]) -> bytes:
    return json.dumps({"model": "m", "token_ids": tokens, "sampling_params": {"max_tokens": 1}}).encode()


def prompt_of(group: int, length: int = 400) -> list[int]:
    return [(group * 7919 + place * 31) % 50_000 for place in range(length)]


def test_without_engines_none_is_chosen() -> None:
    for routing in ("prefix", "session"):
        assert Balancer(routing, 8).choose([], session="a", body=b"") is None


@given(sessions=st.lists(st.text(), unique=True, max_size=50), gone=st.sampled_from(ENGINES))
def test_only_sessions_of_an_engine_that_leaves_move(sessions: list[str], gone: str) -> None:
    balancer = Balancer("session", 8)
    left = [engine for engine in ENGINES if engine != gone]
    for session in sessions:
        before = balancer.choose(ENGINES, session=session, body=b"")
        after = balancer.choose(left, session=session, body=b"")
        assert before in (after, gone)


def test_later_turns_and_other_rollouts_of_a_prompt_use_the_engine_of_the_first() -> None:
    balancer = Balancer("prefix", slack=8)
    for group in range(8):
        first = balancer.choose(ENGINES, session=None, body=generate(prompt_of(group)))
        assert first is not None
        balancer.begin(first)
        longer = prompt_of(group) + [1, 2, 3] * 100
        assert balancer.choose(ENGINES, session="x", body=generate(longer)) == first
        assert balancer.choose(ENGINES, session="y", body=generate(prompt_of(group))) == first
    assert set(balancer.in_flight.values()) == {2}, "new prompts go to the least busy engine"


def test_a_shared_system_prompt_does_not_bind_different_prompts_to_one_engine() -> None:
    balancer, system = Balancer("prefix", slack=8), prompt_of(99, 200)
    chosen = set()
    for group in range(4):
        engine = balancer.choose(ENGINES, session=None, body=generate(system + prompt_of(group, 400)))
        assert engine is not None
        balancer.begin(engine)
        chosen.add(engine)
    assert chosen == set(ENGINES)


@given(requests=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=200), slack=st.integers(1, 8))
def test_prefix_routing_never_exceeds_the_slack(requests: list[tuple[int, bool]], slack: int) -> None:
    balancer, running = Balancer("prefix", slack), []
    for group, is_end in requests:
        if is_end and running:
            balancer.end(running.pop(0))
            continue
        least = min(balancer.in_flight[engine] for engine in ENGINES)
        engine = balancer.choose(ENGINES, session=None, body=generate(prompt_of(group)))
        assert engine is not None
        own = balancer.in_flight[engine]
        assert own - least <= slack or own <= 1.1 * least
        balancer.begin(engine)
        running.append(engine)
    for engine in running:
        balancer.end(engine)
    assert not balancer.in_flight


@given(st.binary(max_size=2000))
def test_arbitrary_bytes_are_accepted_as_a_body(body: bytes) -> None:
    assert len(list(prompt_blocks(body))) <= len(body) // BLOCK_BYTES
    assert Balancer("prefix", 1).choose(ENGINES, session=None, body=body) in ENGINES


def test_blocks_of_a_prefix_are_blocks_of_the_longer_prompt() -> None:
    short, long = prompt_of(1), prompt_of(1) + prompt_of(2)
    prefix = list(prompt_blocks(generate(short)))
    complete_bytes = len(json.dumps(short)) - 1  # without the closing bracket
    assert (
        prefix[: complete_bytes // BLOCK_BYTES]
        == list(prompt_blocks(generate(long)))[: complete_bytes // BLOCK_BYTES]
    )
    assert len(prefix) > 3
