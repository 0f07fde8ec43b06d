"""TLS of the HTTP clients that verifiers creates in an environment server.

verifiers creates one HTTP client for each rollout and judge. A client that sends the run's API key trusts only the
certificate authority of the attempt; other clients trust the machine's certificates. Both TLS contexts are created
once, because loading the machine's certificates takes 20 ms of CPU time, as much as the rest of a small rollout.
"""

from __future__ import annotations

from typing import Any

import httpx

from primerl_hpc.common import env
from primerl_hpc.run.access.keys import RunKeys


def trust_run(keys: RunKeys) -> None:
    """Patch verifiers so that its clients in this process use these two contexts."""
    from verifiers.v1.clients import base, eval

    own, public = keys.client_context(), httpx.create_ssl_context()

    def build_async_httpx(config: Any) -> httpx.AsyncClient:
        is_own = config.api_key_var == env.ENGINE_API_KEY
        return httpx.AsyncClient(
            verify=own if is_own else public,
            timeout=httpx.Timeout(**config.timeout.model_dump()),
            limits=base.DEFAULT_LIMITS,
            trust_env=not is_own,  # the site's proxy does not reach the run's own servers
        )

    base.build_async_httpx = build_async_httpx
    eval.build_async_httpx = build_async_httpx
