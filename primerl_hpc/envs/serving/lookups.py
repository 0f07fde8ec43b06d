"""Keep between rollouts what verifiers looks up for each of them: decorated methods, signatures, client settings.

    remember_lookups()        # in the environment server, before verifiers serves

verifiers 0.4.0 searches all attributes of a task and its harness five times a rollout for decorated methods, inspects
the signature of each of them, and validates the client and the sampling settings of each request, which are equal for
all rollouts of a policy version. The first two are properties of a class.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any

from pydantic import ValidationError

NUM_REMEMBERED = 4096
NUM_SETTINGS = 64
"""Distinct settings that are remembered: those of a policy version for each agent."""


def remember_lookups() -> None:
    """Patch verifiers in this process."""
    from verifiers.v1 import harness, rollout, task
    from verifiers.v1.serve import server
    from verifiers.v1.utils import decorators

    config: Any = importlib.import_module("pydantic_config.cli")  # the package has a function of this name
    modules: tuple[Any, ...] = (harness, rollout, task)
    for module in modules:
        module.discover_decorated = discover_decorated
    decorators.inspect = _Inspect("inspect")
    config._is_dict_annotation = _for_hashable(config._is_dict_annotation)
    server.RunRequest = run_request_with_shared_settings(server.RunRequest)


def discover_decorated(owner: object, mark: str) -> list[Callable[..., Any]]:
    """As verifiers' function: the bound methods of ``owner`` with the attribute ``mark``, by priority, then by name."""
    methods = [method for name in _names(type(owner), mark) if hasattr(method := getattr(owner, name), mark)]
    methods.sort(key=lambda method: (-getattr(method, f"{mark}_priority", 0), method.__name__))
    return methods


@functools.lru_cache(maxsize=NUM_REMEMBERED)
def _names(owner: type, mark: str) -> tuple[str, ...]:
    marked = (
        name
        for parent in owner.__mro__
        for name, value in vars(parent).items()
        if callable(value) and hasattr(value, mark)
    )
    return tuple(dict.fromkeys(marked))


class _Inspect(ModuleType):
    """The module ``inspect`` as `decorators.invoke` uses it: it reads the names of the parameters only."""

    def signature(self, function: Callable[..., Any]) -> inspect.Signature:
        if isinstance(function, MethodType):
            return _method_signature(function.__func__)
        return inspect.signature(function)


@functools.lru_cache(maxsize=NUM_REMEMBERED)
def _method_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a bound method of ``function``."""
    return inspect.signature(MethodType(function, object()))


def _for_hashable(function: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return ``function`` with a cache for hashable arguments."""
    cached = functools.lru_cache(maxsize=NUM_REMEMBERED)(function)

    def call(argument: Any) -> bool:
        try:
            return cached(argument)
        except TypeError:
            return function(argument)

    return call


def run_request_with_shared_settings(run_request: type[Any]) -> type[Any]:
    """Return verifiers' `RunRequest`, changed to validate equal settings once; the requests share the result.

    verifiers only reads them: what an agent changes is a copy.
    """
    settings = ("client", "sampling")

    @functools.lru_cache(maxsize=NUM_SETTINGS)
    def validated(text: str) -> Any:
        return run_request.model_validate({"task_data": {}, "model": "", **json.loads(text)})

    class SharedRunRequest(run_request):
        @classmethod
        def model_validate(cls, obj: Any, **options: Any) -> Any:
            is_plain = isinstance(obj.get("model"), str) and isinstance(obj.get("task_data"), dict)
            if not is_plain or options:
                return run_request.model_validate(obj, **options)
            try:
                shared = validated(json.dumps({name: obj[name] for name in settings}))
            except (KeyError, TypeError, ValidationError):
                # the message then names everything that is wrong with the request
                return run_request.model_validate(obj)
            return shared.model_copy(update={"model": obj["model"], "task_data": obj["task_data"]})

    return SharedRunRequest
