"""The platform of Prime Intellect: ``tracking.prime``.

The protocol is that of prime-rl's monitor (``src/prime_rl/utils/monitor/prime.py`` at 004274e). Registration returns
the id of the platform's run, which later attempts continue.
"""

from __future__ import annotations

import io
import json
import logging
import math
from datetime import UTC, datetime
from typing import Any

import httpx

from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.safety.error_text import describe_error
from primerl_hpc.common.safety.secret_values import mask, mask_data
from primerl_hpc.recipe.schema.run import Prime
from primerl_hpc.tracking.base import (
    Item,
    MetricRow,
    Outcome,
    SampleTable,
    TargetContext,
    TargetUnavailableError,
)

TRIES = 3
FIRST_DELAY_S = 0.5
"""Time between the first and the second try; the next one is twice as long."""
TIMEOUT = 10.0
LAST_TIMEOUT = 1.0
"""While the process ends: its guard kills it after five seconds."""
_AGAIN = frozenset({408, 425, 429})
"""Client errors after which the same request may succeed."""

logger = logging.getLogger(__name__)


class PrimeTarget:
    def __init__(self, context: TargetContext, settings: Prime) -> None:
        key = env.variable(settings.key_variable)
        if key is None:
            raise ConfigError(
                f"tracking.prime: the environment variable {settings.key_variable} is not set",
                hint=f"export {settings.key_variable} before you submit",
            )
        self.context, self.settings = context, settings
        headers = {"Authorization": f"Bearer {key}", "x-api-key": key}
        self._client = httpx.Client(headers=headers, timeout=TIMEOUT)
        self._plain = httpx.Client(timeout=TIMEOUT)  # storage must not receive the key
        self._base = settings.base_url.rstrip("/")
        self.run_id: str = context.memory.get("run_id") or self._register()

    @property
    def position(self) -> int | None:
        return None

    def send(self, item: Item) -> None:
        if isinstance(item, MetricRow):
            values = {"step": item.step, **item.values}
            self._call("POST", "/metrics", {"run_id": self.run_id, "metrics": values})
            return
        if item.distributions:
            body = {"run_id": self.run_id, "step": item.step, "distributions": item.distributions}
            self._call("POST", "/distributions", body)
        if item.rows:
            self._upload(item)

    def finish(self, outcome: Outcome | None, summary: dict[str, float]) -> None:
        """Report the end of the run; an error is logged, because nothing waits for it."""
        try:
            if outcome is not None and self.context.memory.get("status") != outcome:
                self._finalize(outcome, summary)
                self.context.memory["status"] = outcome
                self.context.remember()
        except (TargetUnavailableError, ConfigError) as error:
            logger.warning("Reporting the end of the run failed: %s", error)
        finally:
            self._client.close()
            self._plain.close()

    def _register(self) -> str:
        recipe = self.context.recipe
        body: dict[str, Any] = {
            "base_model": recipe.model.name,
            "max_steps": recipe.max_steps or 0,
            "rollouts_per_example": recipe.rollouts.group_size,
            "seq_len": recipe.seq_len,
            "environments": [{"id": environment.id} for environment in recipe.environments.train],
            "name": self.settings.run_name or recipe.name,
        }
        if recipe.rollouts.batch_tokens is None:
            body["batch_size"] = recipe.rollouts.batch_size
        if self.settings.team_id is not None:
            body["team_id"] = self.settings.team_id
        reply = self._call("POST", "/external-runs", mask_data(body))
        found = reply.get("run", {})
        if not isinstance(found, dict) or not isinstance(run_id := found.get("id"), str) or not run_id:
            raise TargetUnavailableError(f"{self._base} returned no run.id for a new run")
        self.context.memory["run_id"] = run_id
        self.context.remember()
        logger.info("Registered as run %s of the Prime platform", run_id)
        return run_id

    def _upload(self, table: SampleTable) -> None:
        key = {"run_id": self.run_id, "step": table.step}
        place = self._call("POST", "/samples/presign", key).get("data", {})
        url, s3_key = place.get("presignedUrl"), place.get("s3Key")
        if not isinstance(url, str) or not isinstance(s3_key, str):
            raise TargetUnavailableError(f"{self._base} returned no address for samples")
        self._put(url, to_parquet(self.run_id, table))
        self._call("POST", "/samples/confirm", {**key, "s3_key": s3_key})

    def _finalize(self, outcome: Outcome, summary: dict[str, float]) -> None:
        if outcome == "completed":
            try:
                self._call("POST", "/finalize", {"run_id": self.run_id, "summary": summary})
            except (TargetUnavailableError, ConfigError) as error:
                logger.warning("The summary was not accepted: %s", error)
            else:
                return
        self._call("PUT", f"/external-runs/{self.run_id}/status", {"status": outcome})

    def _call(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the reply's JSON object. Raises TargetUnavailableError after `TRIES` tries, ConfigError if refused."""
        reply = self._try(self._client, method, f"{self._base}{path}", json=finite(body))
        try:
            found = reply.json() if reply.content else {}
        except ValueError:
            found = {}
        return found if isinstance(found, dict) else {}

    def _put(self, url: str, data: bytes) -> None:
        self._try(self._plain, "PUT", url, content=data, headers={"Content-Type": "application/parquet"})

    def _try(self, client: httpx.Client, method: str, url: str, **request: Any) -> httpx.Response:
        name = f"{method} {httpx.URL(url).path}"
        cause = ""
        for attempt in range(TRIES):
            if attempt and self.context.ended.wait(FIRST_DELAY_S * 2 ** (attempt - 1)):
                break
            timeout = min(TIMEOUT, LAST_TIMEOUT) if self.context.ended.is_set() else TIMEOUT
            try:
                reply = client.request(method, url, timeout=timeout, **request)
            except httpx.HTTPError as error:
                cause = describe_error(error)
                continue
            if reply.is_success:
                return reply
            cause = f"HTTP {reply.status_code} {mask(reply.text[:200])}".strip()
            if reply.is_client_error and reply.status_code not in _AGAIN:
                raise ConfigError(
                    f"the Prime platform refused {name}: {cause}",
                    hint=f"check {self.settings.key_variable} and tracking.prime",
                )
        raise TargetUnavailableError(f"the Prime platform did not accept {name}: {cause}")


def finite(value: Any) -> Any:
    """Return a JSON value without NaN and infinities."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items() if _is_finite(inner)}
    if isinstance(value, list):
        return [finite(inner) for inner in value if _is_finite(inner)]
    return value


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def to_parquet(run_id: str, table: SampleTable) -> bytes:
    """Return the table in the platform's columns. As in prime-rl, ``completion`` is the conversation as JSON, prompt
    included, and ``trajectory`` a list with the conversation of each branch."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(
            "tracking.prime.log_extras needs pyarrow, which is not installed",
            hint="pip install pyarrow, or set tracking.prime.log_extras.samples: false",
        ) from None
    text, number, real = pa.string(), pa.int64(), pa.float64()
    columns = {"run_id": text, "step": number, "tag": text, "problem_id": number, "sample_id": number}
    columns |= dict.fromkeys(
        ("prompt", "completion", "trajectory", "answer", "env_name", "task", "info"), text
    )
    columns |= {"reward": real, "advantage": real, "metrics": text, "timing": text}
    columns |= {"num_input_tokens": number, "num_output_tokens": number}
    columns |= {"created_at": pa.timestamp("us", tz="UTC")}
    now = datetime.now(UTC)
    rows = [
        _platform_row(run_id, index, sample) | {"created_at": now} for index, sample in enumerate(table.rows)
    ]
    buffer = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows, schema=pa.schema(list(columns.items()))), buffer)
    return buffer.getvalue()


def _platform_row(run_id: str, index: int, sample: dict[str, Any]) -> dict[str, Any]:
    trace, task = sample["trace"], str(sample["task"])
    messages = sample["messages"] or [
        {"role": "user", "content": sample["prompt"]},
        {"role": "assistant", "content": sample["completion"]},
    ]
    tokens = {f"num_{kind}_tokens": trace.get(f"{kind}_tokens") for kind in ("input", "output")}
    scores = {key: sample[key] for key in ("reward", "advantage")}
    return {
        "run_id": run_id,
        "step": sample["step"],
        "tag": "",
        "problem_id": int(task) if task.isascii() and task.isdecimal() and len(task) < 18 else index,
        "sample_id": index,
        "prompt": "",
        "completion": json.dumps(finite(messages)),
        "trajectory": json.dumps(finite([{"messages": messages, **scores, **tokens}])),
        "answer": "",
        "env_name": sample["environment"],
        "task": json.dumps({"id": task}),
        "info": "{}",
        **scores,
        "metrics": json.dumps(finite(trace.get("metrics", {}))),
        "timing": json.dumps({"seconds": trace.get("seconds")}),
        **tokens,
    }
