"""inproc-chat: an agent loop inside the environment server: query the model, call the tools, repeat.

verifiers' own harnesses start a program per rollout (1.2 s of CPU time each, and they need access to a package index);
this one is a coroutine (0.001 s). Like every harness, it sends requests to the rollout's interception endpoint, which
records every turn; in an environment server it calls the endpoint's handler without HTTP (`envs.serving.in_process`).
Limit the loop with ``env_args: {agent: {max_turns: 4}}``.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import verifiers.v1 as vf
from pydantic import Field
from pydantic_core import from_json, to_json
from verifiers.v1.dialects.chat import message_to_wire

from primerl_hpc.envs.serving import in_process

_MAX_PAUSE_S = 8.0
_ERROR_CHARS = 500


class InprocChatConfig(vf.HarnessConfig):
    id: str = "inproc-chat"
    max_retries: int = Field(4, ge=0)
    """Retries of a model call that failed with 429, 5xx or a connection error."""


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
            channel = _Endpoint(stack, f"{endpoint}/chat/completions", secret)
            tools, sessions = await _connect_tools(stack, mcp_urls)
            while True:  # the endpoint rejects turns beyond agent.max_turns with 400
                body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                status, response = await self._ask(channel, body)
                if status >= 400:
                    text = response.decode(errors="replace")[:_ERROR_CHARS]
                    return vf.ProgramResult(1, "", f"HTTP {status}: {text}")
                message = from_json(response)["choices"][0]["message"]
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

    async def _ask(self, endpoint: _Endpoint, body: dict[str, Any]) -> tuple[int, bytes]:
        """Send a request with retries. Returns (status, body) of the last response.

        Raises aiohttp.ClientError if the last try fails without a response.
        """
        for attempt in range(self.config.max_retries + 1):
            is_last = attempt == self.config.max_retries
            try:
                status, content = await endpoint.post(to_json(body), attempt)
                if is_last or (status != 429 and status < 500):
                    return status, content
            except aiohttp.ClientError:
                if is_last:
                    raise
            await asyncio.sleep(min(_MAX_PAUSE_S, 0.25 * 2**attempt))
        raise AssertionError("unreachable: the last try returns or raises")


class _Endpoint:
    """The rollout's interception endpoint: its handler in this process, or its URL."""

    def __init__(self, stack: AsyncExitStack, url: str, secret: str) -> None:
        self.stack, self.url, self.secret = stack, url, secret
        self._client: aiohttp.ClientSession | None = None

    async def post(self, body: bytes, attempt: int) -> tuple[int, bytes]:
        """Send a request. Returns (status, body). Raises aiohttp.ClientError without a response."""
        if in_process.is_here(self.secret):
            found = await in_process.call(self.secret, body, attempt)
            return found.status, found.body
        if self._client is None:  # no proxy, because the endpoint is local
            self._client = await self.stack.enter_async_context(
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), trust_env=False)
            )
        headers = {"Authorization": f"Bearer {self.secret}", "Content-Type": "application/json"}
        if attempt:
            headers[in_process.RETRY_HEADER] = str(attempt)
        async with self._client.post(self.url, data=body, headers=headers) as response:
            return response.status, await response.read()


async def _connect_tools(
    stack: AsyncExitStack, mcp_urls: dict[str, str]
) -> tuple[list[dict[str, Any]], dict[str, tuple[Any, str]]]:
    """Connect to the MCP servers. Returns the tool schemas, and (session, tool's own name) by advertised name."""
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
    """Call a tool. Returns its result as a message; an error is returned to the model as the content."""
    function = call["function"]
    try:
        session, name = sessions[function["name"]]
        result = await session.call_tool(name, json.loads(function["arguments"] or "{}"))
        content = "\n".join(getattr(block, "text", "") for block in result.content)
    except Exception as error:  # noqa: BLE001 (tools are user code)
        content = f"error: {type(error).__name__}: {error}"
    return {"role": "tool", "tool_call_id": call["id"], "name": function["name"], "content": content}


__all__ = ["InprocChatHarness"]
