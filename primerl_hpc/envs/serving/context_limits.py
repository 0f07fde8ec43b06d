"""End an episode whose conversation no longer fits into the model's context, and score what it contains.

verifiers records the refused request as an error of the rollout, so that long conversations would be discarded and
generated again until short ones remain. The end of the context is the ordinary end of an agent's episode, like
``max_total_tokens`` of verifiers: the harness ends, the environment scores, and the trace is truncated.
"""

from __future__ import annotations

import re
from typing import Any

CONDITION = "max_total_tokens"
"""Stop condition of verifiers for a limit of the conversation's tokens."""
_OVERFLOW = re.compile(
    r"exceeds? (?:the )?(?:model's )?maximum (?:context|model|prompt) length|maximum context length is"
    r"|context_length_exceeded|longer than the maximum model length|prompt is too long|exceeds the context window",
    re.IGNORECASE,
)
"""Messages of renderers, vLLM, and of servers with the APIs of OpenAI and Anthropic."""


def is_overflow(message: str, status: int | None) -> bool:
    """True for the error of a model call whose prompt did not fit into the context."""
    return status in (400, 413) and _OVERFLOW.search(message) is not None


def end_at_context_limit() -> None:
    """Patch verifiers' interception server in this process.

    An episode without a complete turn stays failed: its task does not fit into the context.
    """
    from verifiers.v1.interception.server import InterceptionServer

    record_call = InterceptionServer.record_call

    def record_and_end(self: Any, session: Any, *call: Any, **more: Any) -> Any:
        recorded = record_call(self, session, *call, **more)
        error = more.get("error")
        if (
            error is not None
            and is_overflow(str(error), getattr(error, "status_code", None))
            and session.trace.num_turns
        ):
            session.trace.stop(CONDITION)
        return recorded

    InterceptionServer.record_call = record_and_end
