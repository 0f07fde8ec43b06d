"""Who judges: the recipe's ``judge`` behind every judge of an environment that names no server of its own.

verifiers' judges are configs: plugged ones (``args: {task: {judges: [{id: rubric, …}]}}``) and those that a taskset's own
rewards ask (a field of type ``vf.JudgeConfig``). Both get the recipe's address, model and key; the key by the name of its
variable.

    judges = homeless_judges(config)
    appoint(judges, judge_client(run, recipe.judge, index=0, timeout_s=600))
    follow(judges, run, recipe.judge, index=0)       # an engine that comes back elsewhere is asked there
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.errors import TimeoutWaitingError
from primerl_hpc.common.names import Role, process_name
from primerl_hpc.common.rundir import RunDir, read_endpoint
from primerl_hpc.recipe.model_schema import Judge

logger = logging.getLogger(__name__)

POLL_S = 0.2
FOLLOW_S = 1.0


def judge_client(run: RunDir, judge: Judge, *, index: int, timeout_s: float) -> dict[str, str]:
    """What a verifiers judge has to know of the recipe's. Environment server ``index`` takes the engines in turn.

    Waits for its engine of the run. Raises TimeoutWaitingError, and ConfigError when the key of a server elsewhere is not set.
    """
    if judge.base_url is not None:
        judge.key()
        return client_of(judge.base_url, judge.model.name, judge.key_variable or env.NO_KEY)
    engine = _engine(judge, index)
    deadline = time.monotonic() + timeout_s
    while (base_url := _base_url(run, engine)) is None:
        if time.monotonic() > deadline:
            raise TimeoutWaitingError(
                f"waited {timeout_s:.0f} s for {engine}", mend="see logs/latest/judge/*.log"
            )
        time.sleep(POLL_S)
    return client_of(base_url, judge.model.name, env.ENGINE_API_KEY)


def client_of(base_url: str, model: str, key_variable: str) -> dict[str, str]:
    return {"base_url": base_url, "model": model, "api_key_var": key_variable}


def homeless_judges(config: Any) -> list[Any]:
    """Judges of a verifiers environment config whose server is verifiers' default."""
    from verifiers.v1.configs.judge import JudgeConfig

    return [judge for judge in judges_of(config.taskset) if judge.base_url == JudgeConfig().base_url]


def appoint(judges: Iterable[Any], client: dict[str, str]) -> None:
    """Fill ``client`` into these judges, in place; verifiers reads their configs anew for each question."""
    for judge in judges:
        for name, value in client.items():
            setattr(judge, name, value)


def follow(judges: list[Any], run: RunDir, judge: Judge, *, index: int) -> None:
    """From now on, in a thread, send these judges to wherever their engine of the run is. Returns at once."""
    if judge.base_url is None:
        engine = _engine(judge, index)
        threading.Thread(
            target=_keep_following, args=(judges, run, engine), name="judge", daemon=True
        ).start()


def _keep_following(judges: list[Any], run: RunDir, engine: str) -> None:
    is_told = False
    while True:
        time.sleep(FOLLOW_S)
        try:
            base_url = _base_url(run, engine)
            is_told = False
        except OSError as error:  # a filesystem's fault passes; until then the old address has to do
            if not is_told:
                logger.warning("cannot see where %s is, trying again: %s", engine, error)
            is_told = True
            continue
        if base_url is not None and base_url != judges[0].base_url:
            logger.info("%s is at %s now", engine, base_url)
            appoint(judges, {"base_url": base_url})


def _engine(judge: Judge, index: int) -> str:
    return process_name(Role.JUDGE, index % judge.layout.replicas)


def _base_url(run: RunDir, engine: str) -> str | None:
    endpoint = read_endpoint(run, engine)
    return f"{endpoint['url']}/v1" if endpoint else None


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
