"""Send the limit of a reply under the name that the server accepts.

verifiers knows one name, ``max_tokens``, and converts others to it. APIs of reasoning models refuse it and need
``max_completion_tokens``. The orchestrator names the parameter in the sampling of a request (`TOKEN_LIMIT`).
"""

from __future__ import annotations

from typing import Any

TOKEN_LIMIT = "primerl_token_limit"
"""Key of verifiers' sampling with the name; it is never sent to a server."""


def rename_token_limits() -> None:
    """Patch verifiers' chat completions in this process."""
    from verifiers.v1.dialects.chat import ChatDialect

    apply_overrides = ChatDialect.apply_overrides

    def apply_and_rename(self: Any, body: Any, model: str, sampling: Any) -> Any:
        applied = dict(apply_overrides(self, body, model, sampling))
        name = applied.pop(TOKEN_LIMIT, None)
        if name is not None and "max_tokens" in applied:
            applied[name] = applied.pop("max_tokens")
        return applied

    ChatDialect.apply_overrides = apply_and_rename
