"""inproc-chat: an agent loop that runs inside the environment server: ask the model, call the tools, ask again.

verifiers' stock harnesses start a program per rollout (1.2 s of CPU each, and a package index they must reach); this
one is a coroutine (0.01 s). It speaks to the rollout's interception endpoint as any harness does, so every turn is
recorded there. Bound the loop with ``env_args: {agent: {max_turns: 4}}``.
"""

from __future__ import annotations

import asyncio
import json
import weakref
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.dialects.chat import message_to_wire

_MAX_PAUSE_S = 8.0
_ERROR_CHARS = 500


class InprocChatConfig(vf.HarnessConfig):
    id: str = "inproc-chat"
    max_retries: int = Field(4, ge=0)
    """Repeats of one model call that failed with 429, 5xx or a broken connection."""


class InprocChatHarness(vf.Harness[InprocChatConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        messages = self._opening(data)
        async with AsyncExitStack() as stack:
            tools, sessions = await _connect_tools(stack, mcp_urls)
            while True:  # a turn beyond agent.max_turns is refused with 400
                body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                answer = await self._post(f"{endpoint}/chat/completions", body, secret)
                if answer.status_code >= 400:
                    return vf.ProgramResult(1, "", f"HTTP {answer.status_code}: {answer.text[:_ERROR_CHARS]}")
                message = answer.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(0, "", "")
                for call in message["tool_calls"]:
                    messages.append(await _call_tool(sessions, call))

    def _opening(self, data: vf.TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return [*messages, *(message_to_wire(message) for message in prompt or [])]

    async def _post(self, url: str, body: dict[str, Any], secret: str) -> httpx.Response:
        """The answer of the last try; a broken connection on the last try is raised."""
        for attempt in range(self.config.max_retries + 1):
            is_last = attempt == self.config.max_retries
            headers = {"Authorization": f"Bearer {secret}"}
            if attempt:  # tells the interception endpoint that this repeats a turn and does not fork it
                headers["x-stainless-retry-count"] = str(attempt)
            try:
                answer = await _client().post(url, json=body, headers=headers)
                if is_last or (answer.status_code != 429 and answer.status_code < 500):
                    return answer
            except httpx.TransportError:
                if is_last:
                    raise
            await asyncio.sleep(min(_MAX_PAUSE_S, 0.25 * 2**attempt))
        raise AssertionError("unreachable: the last try returns or raises")


_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
    weakref.WeakKeyDictionary()
)


def _client() -> httpx.AsyncClient:
    """One connection pool per event loop; the endpoint is on this host, so proxies are not asked."""
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        _clients[loop] = httpx.AsyncClient(timeout=None, trust_env=False, limits=limits)
    return _clients[loop]


async def _connect_tools(
    stack: AsyncExitStack, mcp_urls: dict[str, str]
) -> tuple[list[dict[str, Any]], dict[str, tuple[Any, str]]]:
    """Tool schemas for the model, and by advertised name the MCP session and the tool's own name."""
    tools: list[dict[str, Any]] = []
    sessions: dict[str, tuple[Any, str]] = {}
    for prefix, url in mcp_urls.items():
        from mcp import Client

        session = await stack.enter_async_context(Client(url))
        for tool in (await session.list_tools()).tools:
            name = f"{prefix}_{tool.name}" if prefix else tool.name
            sessions[name] = (session, tool.name)
            function = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
            tools.append({"type": "function", "function": function})
    return tools, sessions


async def _call_tool(sessions: dict[str, tuple[Any, str]], call: dict[str, Any]) -> dict[str, Any]:
    """The tool's answer as a message; what goes wrong in a call is for the model to read."""
    function = call["function"]
    try:
        session, name = sessions[function["name"]]
        result = await session.call_tool(name, json.loads(function["arguments"] or "{}"))
        content = "\n".join(getattr(block, "text", "") for block in result.content)
    except Exception as error:  # noqa: BLE001 (tools are user code)
        content = f"error: {type(error).__name__}: {error}"
    return {"role": "tool", "tool_call_id": call["id"], "name": function["name"], "content": content}


__all__ = ["InprocChatHarness"]
