"""Fetch everything that a run needs, one need after the other, while holding the lock of the cache.

    for item in prefetch(needs, profile, on_progress=show): print(item.need.name, item.found.state)
    items = inspect(needs, profile)                                 # only looks

Two commands that use one cache run one after the other: the second one finds what the first one has fetched.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.errors import OccupiedError, PrimerlError
from primerl_hpc.common.files import write_json
from primerl_hpc.common.interpreters import InterpreterError, ask
from primerl_hpc.common.waiting import repeating
from primerl_hpc.offline.prefetch.images import look_for_image, pull_image
from primerl_hpc.offline.prefetch.inventory import Found, Presence, look, marker_path, markers_folder
from primerl_hpc.offline.prefetch.needs import Need, NeedKind
from primerl_hpc.offline.prefetch.packages import ask_python, child_variables, look_for_package
from primerl_hpc.run.lock import TOUCH_EVERY_S, SupervisorLock
from primerl_hpc.transport.base_models.hub_cache import cache_folder, open_cache

WAIT_S = 2.0
FETCH, COUNT_TASKS = "primerl_hpc.offline.prefetch.fetch:fetch", "primerl_hpc.envs.lookup:count_tasks"
Progress = Callable[[Need, int, int], None]
"""Called with a need, its bytes so far and in total."""


@dataclass(frozen=True)
class Item:
    """A need, and what is there of it."""

    need: Need
    found: Found
    fault: str = ""
    """Why it could not be fetched."""
    hint: str = ""
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.need.kind.value,
            "name": self.need.name,
            "state": self.found.state.value,
            "bytes": self.found.num_bytes,
            "detail": self.fault or self.found.detail,
            "hint": self.hint,
            "seconds": round(self.seconds, 1),
        }


def inspect(needs: Sequence[Need], profile: Profile, *, loads_tasks: bool = False) -> list[Item]:
    """Return what is there of each need; nothing is written.

    ``loads_tasks``: load environments whose tasks were never loaded in offline mode, which takes seconds.
    """
    items = [Item(need, _look(need, profile)) for need in needs]
    if not loads_tasks:
        return items
    return [_try_offline(item) if item.found.state == Presence.UNKNOWN else item for item in items]


def prefetch(needs: Sequence[Need], profile: Profile, on_progress: Progress) -> Iterator[Item]:
    """Fetch what is missing; yield an item for every need. A need that fails does not stop the others."""
    for folder in {cache_folder(need.variables) for need in needs}:
        if warning := open_cache(folder):
            print(f"warning: {warning}", file=sys.stderr)
    with contextlib.ExitStack() as locks:
        for folder in sorted({markers_folder(need.variables) for need in needs}):
            locks.enter_context(_locked(folder))
        for need in needs:
            found = _look(need, profile)
            if found.is_complete and marker_is_current(need):
                yield Item(need, found)
                continue
            start = time.monotonic()
            item = _fetch(Item(need, found), profile, on_progress)
            yield replace(item, seconds=time.monotonic() - start)


def marker_is_current(need: Need) -> bool:
    """True if a complete model was verified by this command; others are verified now."""
    return need.kind not in (NeedKind.MODEL, NeedKind.TOKENIZER) or marker_path(need).is_file()


def _look(need: Need, profile: Profile) -> Found:
    if need.container is not None:
        return look_for_image(need.container, profile.cache_path)
    return look_for_package(need) if need.kind == NeedKind.PACKAGE else look(need)


def _fetch(item: Item, profile: Profile, on_progress: Progress) -> Item:
    need = item.need
    try:
        if need.container is not None:
            if item.found.state == Presence.MISSING and profile.cache_path is not None:
                pull_image(need.container, profile.cache_path)
            return Item(need, _look(need, profile))
        if need.kind == NeedKind.ENVIRONMENT:
            return _load_tasks(item, is_offline=False)
        if need.kind == NeedKind.PACKAGE:
            return _install(item)
        if need.kind == NeedKind.DATASET and need.python is None:
            return replace(item, hint="it is read inside a container: load it there once")
    except PrimerlError as error:
        return replace(item, fault=error.cause, hint=error.hint)
    return _download(need, on_progress)


def _install(item: Item) -> Item:
    """Install the package of an environment into the interpreter that will load it."""
    need = item.need
    if need.python is None:
        return replace(item, hint="it is loaded inside a container: install it in the image")
    ask_python(need.python, need.name, child_variables(need, is_offline=False), install=True)
    return Item(need, look_for_package(need))


def _download(need: Need, on_progress: Progress) -> Item:
    """Fetch a model, tokenizer or dataset.

    It runs in a process of its own, because package huggingface_hub reads the caches and the offline mode from
    variables when it is imported, and because datasets are prepared by the interpreter that will read them.
    """
    request = {
        "kind": need.kind.value,
        "name": need.name,
        "hub": str(cache_folder(need.variables)),
        "marker": str(marker_path(need)),
        "source": dict(need.source),
    }
    python = need.python if need.kind == NeedKind.DATASET and need.python else sys.executable
    variables = child_variables(need, is_offline=False)
    try:
        ask(python, variables, FETCH, request, timeout_s=None, on_progress=lambda of: on_progress(need, *of))
    except PrimerlError as error:
        found = look(need)
        found = replace(found, state=Presence.PARTIAL) if found.is_complete else found
        fault = f"{error.location}: {error.cause}" if error.location else error.cause
        return Item(need, found, fault, error.hint)
    return Item(need, look(need))


def _try_offline(item: Item) -> Item:
    return _load_tasks(item, is_offline=True) if item.need.kind == NeedKind.ENVIRONMENT else item


def _load_tasks(item: Item, *, is_offline: bool) -> Item:
    """Load all tasks of an environment in the interpreter that will do so in the run; write the marker if online."""
    need = item.need
    if need.python is None:
        return replace(item, hint="it is loaded inside a container, which this command does not start")
    variables = child_variables(need, is_offline=is_offline)
    try:
        count = ask(need.python, variables, COUNT_TASKS, dict(need.source), timeout_s=None)
    except InterpreterError as error:
        return replace(item, fault=error.cause)
    except PrimerlError as error:
        cause = " ".join(error.cause.split())
        return Item(need, Found(Presence.MISSING, cause), cause, error.hint)
    if not is_offline:
        write_json(marker_path(need), {"name": need.name, "tasks": count, "time": round(time.time(), 3)})
    return Item(need, Found(Presence.COMPLETE, f"{count} tasks were loaded"))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a cache; wait while another command holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = SupervisorLock(folder / "lock")
    is_told = False
    while True:
        try:
            lock.acquire()
            break
        except OccupiedError as error:
            if not is_told:
                other = error.cause.partition("(")[2].partition(")")[0]
                print(
                    f"another prefetch ({other}) fills {folder.parent}; waiting for its end", file=sys.stderr
                )
                is_told = True
            time.sleep(WAIT_S)
    try:
        with repeating(TOUCH_EVERY_S, lock.touch):
            yield
    finally:
        lock.release()
