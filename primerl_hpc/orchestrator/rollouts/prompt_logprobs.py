"""Log-probabilities of given tokens under a model that vLLM serves: ``prompt_logprobs`` of ``/v1/completions``.

    client = PromptLogprobs("Qwen/Qwen3-32B", key)
    await client.of("http://node7:8000/v1", [151644, 872, …])      # log p of each token given the tokens before it, [N]

The log-probabilities are for temperature 1. The prompt is token ids, so the server must share the policy's vocabulary.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from primerl_hpc.orchestrator.rollout_data import RolloutFailed
from primerl_hpc.orchestrator.rollouts.trajectories import ENGINE_STATUSES


class PromptLogprobs:
    """HTTP client for prompt log-probabilities."""

    def __init__(
        self,
        model: str,
        key: str | None,
        *,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 120.0,
        max_concurrent: int = 64,
    ) -> None:
        """``tls``: the run's context for the run's own engines.

        Without it, a server needs a certificate that this machine trusts.
        """
        self.model = model
        self.client = httpx.AsyncClient(
            verify=tls or httpx.create_ssl_context(),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=timeout_s,
            trust_env=False,
            limits=httpx.Limits(max_connections=max_concurrent),
        )
        self._permits = asyncio.Semaphore(max_concurrent)

    async def of(self, url: str, tokens: list[int], *, cache_salt: str | None = None) -> NDArray[np.float32]:
        """Return log-probabilities [N]; 0 for the first token.

        Raises RolloutFailed, with ``is_engine_fault`` if the server did not respond.
        """
        body = {
            "model": self.model,
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        body |= {"cache_salt": cache_salt} if cache_salt else {}
        async with self._permits:
            response = await self.post(f"{url}/completions", body)
        return _parse(response, tokens)

    async def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON response. Raises RolloutFailed."""
        try:
            response = await self.client.post(url, json=body)
            if response.status_code == 200:
                return dict(response.json())
        except (httpx.HTTPError, ValueError) as error:
            message = str(error) or type(error).__name__
            raise RolloutFailed("TeacherError", message, is_engine_fault=True) from error
        raise RolloutFailed(
            "TeacherError",
            f"HTTP {response.status_code} {response.text[:200]}",
            is_engine_fault=response.status_code in ENGINE_STATUSES,
        )

    async def close(self) -> None:
        await self.client.aclose()


def _parse(response: dict[str, Any], tokens: list[int]) -> NDArray[np.float32]:
    entries = (response.get("choices") or [{}])[0].get("prompt_logprobs")
    if not entries or len(entries) != len(tokens):
        raise RolloutFailed(
            "TeacherError", "the server returned no log-probabilities for the prompt's tokens"
        )
    values = [0.0]
    for token, entry in zip(tokens[1:], entries[1:], strict=True):
        if not entry or str(token) not in entry:
            raise RolloutFailed("TeacherError", f"the server returned no log-probability for token {token}")
        values.append(float(entry[str(token)]["logprob"]))
    logprobs = np.asarray(values, dtype=np.float32)
    if not np.isfinite(logprobs).all():
        raise RolloutFailed("TeacherError", "a log-probability is not finite")
    return logprobs
