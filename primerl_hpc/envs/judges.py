"""Who judges: the recipe's ``judge`` behind every judge of an environment that names no server of its own.

verifiers' judges are configs: plugged ones (``args: {task: {judges: [{id: rubric, …}]}}``) and those that a taskset's own
rewards ask (a field of type ``vf.JudgeConfig``). Both get the recipe's address, model and key; the key by the name of its
variable.

    appoint(config, judge_client(run, recipe.judge, index=0))
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.errors import TimeoutWaitingError
from primerl_hpc.common.names import Role
from primerl_hpc.common.rundir import RunDir, read_endpoints
from primerl_hpc.recipe.model_schema import Judge

POLL_S = 0.2


def judge_client(run: RunDir, judge: Judge, *, index: int, timeout_s: float) -> dict[str, str]:
    """What a verifiers judge has to know of the recipe's. Environment server ``index`` takes the engines in turn.

    Waits for the run's own engines. Raises TimeoutWaitingError, and ConfigError when the key of a server elsewhere is not set.
    """
    if judge.base_url is not None:
        judge.key()
        return _client(judge.base_url, judge.model.name, judge.key_variable or env.NO_KEY)
    deadline = time.monotonic() + timeout_s
    while len(ends := read_endpoints(run, Role.JUDGE.value)) < judge.layout.replicas:
        if time.monotonic() > deadline:
            raise TimeoutWaitingError(
                f"{len(ends)} of the judge's {judge.layout.replicas} engines were ready after {timeout_s:.0f} s",
                mend="see logs/latest/judge/*.log",
            )
        time.sleep(POLL_S)
    urls = [end["url"] for _, end in sorted(ends.items())]
    return _client(f"{urls[index % len(urls)]}/v1", judge.model.name, env.ENGINE_API_KEY)


def _client(base_url: str, model: str, key_variable: str) -> dict[str, str]:
    return {"base_url": base_url, "model": model, "api_key_var": key_variable}


def homeless_judges(config: Any) -> list[Any]:
    """Judges of a verifiers environment config whose server is verifiers' default."""
    from verifiers.v1.configs.judge import JudgeConfig

    return [judge for judge in judges_of(config.taskset) if judge.base_url == JudgeConfig().base_url]


def appoint(config: Any, client: dict[str, str]) -> int:
    """Fill ``client`` into the judges of a verifiers environment config that have no server, in place; how many took it."""
    judges = homeless_judges(config)
    for judge in judges:
        for name, value in client.items():
            setattr(judge, name, value)
    return len(judges)


def judges_of(config: Any) -> Iterator[Any]:
    """Every JudgeConfig in a taskset's config, its task's included."""
    from pydantic import BaseModel
    from verifiers.v1.configs.judge import JudgeConfig

    if isinstance(config, JudgeConfig):
        yield config
        return
    values = list(config) if isinstance(config, (list, tuple)) else []
    if isinstance(config, BaseModel):
        values = [getattr(config, name) for name in type(config).model_fields]
    for value in values:
        yield from judges_of(value)
