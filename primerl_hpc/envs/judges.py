"""Judges: environments whose judges have no server use the ``judge`` of the recipe.

verifiers configures judges by `JudgeConfig`: judges in ``args: {task: {judges: [{id: rubric, …}]}}``, and judges that a
taskset's own rewards use (a field of type ``vf.JudgeConfig``). Both kinds receive URL, model and the name of the
environment variable with the API key from the recipe's judge.

    judges = judges_without_endpoint(config)
    assign_client(judges, judge_client(run, recipe.judge, index=0, timeout_s=600))
    track_endpoint(judges, run, recipe.judge, index=0)       # follow the engine when it restarts with another URL
"""

from __future__ import annotations

import importlib.util
import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError, TimeoutWaitingError
from primerl_hpc.common.names import Role, process_name
from primerl_hpc.common.waiting import Polling
from primerl_hpc.envs.tasks import resolve_environment
from primerl_hpc.envs.tools import package_mentions
from primerl_hpc.recipe.control_tokens import ANY_CONTROL, neutralize
from primerl_hpc.recipe.schema.model import Judge
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.endpoints import read_endpoint
from primerl_hpc.run.rundir import RunDir

logger = logging.getLogger(__name__)

POLL_S = 0.2  # while waiting for the judge's engine
TRACK_S = 1.0  # between reads of its endpoint


def judge_client(run: RunDir, judge: Judge, *, index: int, timeout_s: float) -> dict[str, str]:
    """Return URL, model and key variable of the recipe's judge. Server ``index`` uses engine ``index`` modulo replicas.

    Waits until the engine is published. Raises TimeoutWaitingError if it is not within ``timeout_s``, ConfigError if
    the key of an external server is not set.
    """
    if judge.base_url is not None:
        judge.key()
        return client_of(judge.base_url, judge.model.name, judge.key_variable or env.NO_KEY)
    engine = _engine(judge, index)
    for _ in Polling(timeout_s, POLL_S):
        if (base_url := _base_url(run, engine)) is not None:
            return client_of(base_url, judge.model.name, env.ENGINE_API_KEY)
    raise TimeoutWaitingError(
        f"{engine} was not ready within {timeout_s:.0f} s", hint="see logs/latest/judge/*.log"
    )


def client_of(base_url: str, model: str, key_variable: str) -> dict[str, str]:
    """Return the fields of a verifiers judge that select its server."""
    return {"base_url": base_url, "model": model, "api_key_var": key_variable}


def judges_without_endpoint(config: Any) -> list[Any]:
    """Return the judges in a verifiers environment config that use verifiers' default server."""
    from verifiers.v1.configs.judge import JudgeConfig

    return [judge for judge in judges_of(config.taskset) if judge.base_url == JudgeConfig().base_url]


def refuse_third_party(judges: list[Any], *, location: str) -> None:
    """Raise ConfigError if ``judges`` (see `judges_without_endpoint`) is not empty. For recipes without a judge.

    Otherwise completions would be sent to verifiers' default server.
    """
    if judges:
        raise ConfigError(
            "a judge has no base_url and the recipe has no judge, so completions would be sent to a third party, "
            f"{judges[0].base_url}",
            location=location,
            hint="add judge: {model: {name: …}} to the recipe, or set the judge's base_url in args",
        )


def check_judges(recipe: Recipe) -> None:
    """Call `refuse_third_party` for all environments of the recipe that this interpreter can load, before submission.

    An environment that cannot be loaded here is checked by its server, which fails with the same message. Only packages
    and arguments that mention a judge are loaded, because importing verifiers takes seconds.
    """
    if recipe.judge is not None or importlib.util.find_spec("verifiers") is None:
        return
    evaluation = recipe.after.evaluation if recipe.after is not None else None
    after = evaluation.environments if evaluation is not None else ()
    for environment in (*recipe.environments.train, *recipe.environments.eval, *after):
        arguments = f"{environment.args}{environment.env_args}"
        if environment.address is not None or not (
            "judge" in arguments or package_mentions(environment, "Judge")
        ):
            continue
        try:
            judges = judges_without_endpoint(resolve_environment(environment))
        except Exception:  # noqa: BLE001 (any error in a package's own code; the environment server reports it)
            continue
        refuse_third_party(judges, location=f"environment {environment.label}")


def neutralize_requests(*patterns: re.Pattern[str]) -> None:
    """Patch verifiers so that judges in this process receive text without control tokens.

    Otherwise a completion that contains ``<|im_end|>`` could end the judge's prompt and supply the judge's answer.
    ``patterns``: control tokens of known tokenizers, in addition to the common ones.
    """
    from verifiers.v1.judge import Judge
    from verifiers.v1.judges.decision import DecisionJudge

    complete, evaluate = Judge.complete, DecisionJudge.evaluate

    async def complete_neutralized(self: Any, messages: Any, **options: Any) -> Any:
        return await complete(self, _neutralized(messages, (ANY_CONTROL, *patterns)), **options)

    async def evaluate_neutralized(self: Any, *, trace: Any = None, **fields: Any) -> Any:
        return await evaluate(self, trace=trace, **_neutralized(fields, (ANY_CONTROL, *patterns)))

    Judge.complete = complete_neutralized
    DecisionJudge.evaluate = evaluate_neutralized


def _neutralized(value: Any, patterns: tuple[re.Pattern[str], ...]) -> Any:
    """Neutralize all strings in a string, list, mapping or pydantic model. Returns a copy."""
    from pydantic import BaseModel

    if isinstance(value, str):
        return neutralize(value, *patterns)
    if isinstance(value, BaseModel):
        fields = {name: _neutralized(getattr(value, name), patterns) for name in type(value).model_fields}
        return value.model_copy(update=fields)
    if isinstance(value, dict):
        return {key: _neutralized(item, patterns) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_neutralized(item, patterns) for item in value]
    return value


def assign_client(judges: Iterable[Any], client: dict[str, str]) -> None:
    """Set the fields of ``client`` in these judges, in place. verifiers reads the configs for every request."""
    for judge in judges:
        for name, value in client.items():
            setattr(judge, name, value)


def track_endpoint(judges: list[Any], run: RunDir, judge: Judge, *, index: int) -> None:
    """Start a daemon thread that sets the judges' URL whenever their engine of the run restarts with another one."""
    if judge.base_url is None:
        engine = _engine(judge, index)
        threading.Thread(target=_track_forever, args=(judges, run, engine), name="judge", daemon=True).start()


def _track_forever(judges: list[Any], run: RunDir, engine: str) -> None:
    is_reported = False
    while True:
        time.sleep(TRACK_S)
        try:
            base_url = _base_url(run, engine)
            is_reported = False
        except OSError as error:  # filesystem errors are transient: keep the old URL
            if not is_reported:
                logger.warning("cannot read the endpoint of %s, retrying: %s", engine, error)
            is_reported = True
            continue
        if base_url is not None and base_url != judges[0].base_url:
            logger.info("%s has moved to %s", engine, base_url)
            assign_client(judges, {"base_url": base_url})


def _engine(judge: Judge, index: int) -> str:
    return process_name(Role.JUDGE, index % judge.layout.replicas)


def _base_url(run: RunDir, engine: str) -> str | None:
    endpoint = read_endpoint(run, engine)
    return f"{endpoint['url']}/v1" if endpoint else None


def judges_of(config: Any) -> Iterator[Any]:
    """Yield every JudgeConfig in a taskset's config, including those of its task."""
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
