"""How likely given tokens are under a model that vLLM serves: ``prompt_logprobs`` of ``/v1/completions``.

    scores = PromptLogprobs("Qwen/Qwen3-32B", key)
    await scores.of("http://node7:8000/v1", [151644, 872, …])        # log p of each token given those before it, [N]

Its log-probabilities are of temperature 1. The prompt is token ids, so the server must share the policy's vocabulary.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from primerl_hpc.orchestrator.trajectories import ENGINE_STATUSES, RolloutFailed


class PromptLogprobs:
    def __init__(
        self, model: str, key: str | None, *, timeout_s: float = 120.0, max_concurrent: int = 64
    ) -> None:
        self.model = model
        self.client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=timeout_s,
            trust_env=False,
            limits=httpx.Limits(max_connections=max_concurrent),
        )
        self._permits = asyncio.Semaphore(max_concurrent)

    async def of(self, url: str, tokens: list[int], *, cache_salt: str | None = None) -> NDArray[np.float32]:
        """[N]; 0 for the first token. Raises RolloutFailed; it is worth another try where nobody answered."""
        body = {
            "model": self.model,
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        body |= {"cache_salt": cache_salt} if cache_salt else {}
        async with self._permits:
            answer = await self.post(f"{url}/completions", body)
        return _parse(answer, tokens)

    async def post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """Its JSON answer. Raises RolloutFailed."""
        try:
            answer = await self.client.post(url, json=body)
            if answer.status_code == 200:
                return dict(answer.json())
        except (httpx.HTTPError, ValueError) as error:
            message = str(error) or type(error).__name__
            raise RolloutFailed("TeacherError", message, is_engine_fault=True) from error
        raise RolloutFailed(
            "TeacherError",
            f"HTTP {answer.status_code} {answer.text[:200]}",
            is_engine_fault=answer.status_code in ENGINE_STATUSES,
        )

    async def close(self) -> None:
        await self.client.aclose()


def _parse(answer: dict[str, Any], tokens: list[int]) -> NDArray[np.float32]:
    entries = (answer.get("choices") or [{}])[0].get("prompt_logprobs")
    if not entries or len(entries) != len(tokens):
        raise RolloutFailed("TeacherError", "it gives no log-probabilities of a prompt's tokens")
    values = [0.0]
    for token, entry in zip(tokens[1:], entries[1:], strict=True):
        if not entry or str(token) not in entry:
            raise RolloutFailed("TeacherError", f"it gives no log-probability of token {token}")
        values.append(float(entry[str(token)]["logprob"]))
    found = np.asarray(values, dtype=np.float32)
    if not np.isfinite(found).all():
        raise RolloutFailed("TeacherError", "a log-probability is not finite")
    return found
