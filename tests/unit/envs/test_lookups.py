"""Results of lookups that are kept between rollouts: equal to those of verifiers, and without state of a rollout."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.serve.types import RunRequest
from verifiers.v1.utils import decorators

from primerl_hpc.envs.serving.lookups import (
    _Inspect,
    discover_decorated,
    run_request_with_shared_settings,
)

SAMPLING = {"temperature": 0.7, "max_tokens": 9}
CLIENT = {"type": "train", "base_url": "http://127.0.0.1:1/v1"}


class Base:
    @vf.reward(weight=2.0)
    def first(self, trace: Any) -> float:
        return 1.0

    @vf.reward(priority=5)
    def last(self, trace: Any, runtime: Any) -> float:
        return 2.0

    @vf.metric
    def counted(self, trace: Any) -> float:
        return 3.0


class Derived(Base):
    def first(self, trace: Any) -> float:  # an undecorated override suppresses the decorated method
        return 0.0

    @vf.reward
    def own(self, task: Any) -> float:
        return 4.0

    @property
    def fails(self) -> float:
        raise AssertionError("no property is evaluated")


@pytest.mark.parametrize("owner", [Base(), Derived()])
@pytest.mark.parametrize("mark", ["reward", "metric", "stop"])
def test_decorated_methods_are_those_that_verifiers_finds(owner: Base, mark: str) -> None:
    for _ in range(2):
        assert discover_decorated(owner, mark) == decorators.discover_decorated(owner, mark)
    assert [method.__self__ for method in discover_decorated(owner, "metric")] == [owner]


@pytest.mark.parametrize(
    "function", [Base().last, Derived().own, Base.counted, len, lambda trace, *, task: 0]
)
def test_the_parameters_of_a_function_are_those_that_inspect_finds(function: Callable[..., Any]) -> None:
    for _ in range(2):
        assert _Inspect("inspect").signature(function) == inspect.signature(function)


def request(**fields: Any) -> dict[str, Any]:
    raw = {"task_data": {"prompt": "a"}, "client": dict(CLIENT), "model": "m", "sampling": dict(SAMPLING)}
    return raw | fields


def test_requests_with_equal_settings_share_them_and_nothing_else() -> None:
    shared = run_request_with_shared_settings(RunRequest)
    first = shared.model_validate(request())
    second = shared.model_validate(request(task_data={"prompt": "b"}, model="n"))
    third = shared.model_validate(request(sampling=SAMPLING | {"temperature": 1.0}))
    assert first == RunRequest.model_validate(request())
    assert (second.task_data, second.model, second.client) == ({"prompt": "b"}, "n", first.client)
    assert second.client is first.client and second.sampling is first.sampling
    assert third.sampling.temperature == 1.0 and first.sampling.temperature == 0.7
    assert isinstance(first, RunRequest)


@pytest.mark.parametrize(
    "fields",
    [{"model": 3}, {"task_data": None}, {"sampling": {"temperature": "hot"}}, {"client": {"type": "x"}}],
)
def test_a_request_that_is_wrong_is_refused_as_verifiers_refuses_it(fields: dict[str, Any]) -> None:
    shared = run_request_with_shared_settings(RunRequest)
    with pytest.raises(ValidationError) as ours:
        shared.model_validate(request(**fields))
    with pytest.raises(ValidationError) as theirs:
        RunRequest.model_validate(request(**fields))
    assert ours.value.errors(include_url=False) == theirs.value.errors(include_url=False)
    incomplete = request()
    del incomplete["client"]
    with pytest.raises(ValidationError, match="client"):
        shared.model_validate(incomplete)


def test_the_patched_names_are_those_that_verifiers_uses() -> None:
    code = """
from primerl_hpc.envs.serving import lookups
lookups.remember_lookups()
from verifiers.v1 import harness, rollout, task
from verifiers.v1.serve import server
from verifiers.v1.utils import decorators
assert {m.discover_decorated for m in (harness, rollout, task)} == {lookups.discover_decorated}
assert decorators.inspect.signature(dict().get) and server.RunRequest.__name__ == "SharedRunRequest"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
