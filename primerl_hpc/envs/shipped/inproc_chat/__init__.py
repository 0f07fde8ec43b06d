"""inproc-chat: an agent loop that runs inside the environment server: ask the model, call the tools, ask again.

verifiers' stock harnesses start a program per rollout (1.2 s of CPU each, and a package index they must reach); this
one is a coroutine (0.01 s). It speaks to the rollout's interception endpoint as any harness does, so every turn is
recorded there. Bound the loop with ``env_args: {agent: {max_turns: 4}}``.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
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
            # not httpx: its connections cost the server a quarter of its CPU time; the endpoint is on this host: no proxy
            client = await stack.enter_async_context(
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), trust_env=False)
            )
            tools, sessions = await _connect_tools(stack, mcp_urls)
            while True:  # a turn beyond agent.max_turns is refused with 400
                body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                status, answer = await self._post(client, f"{endpoint}/chat/completions", body, secret)
                if status >= 400:
                    said = answer.decode(errors="replace")[:_ERROR_CHARS]
                    return vf.ProgramResult(1, "", f"HTTP {status}: {said}")
                message = json.loads(answer)["choices"][0]["message"]
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

    async def _post(
        self, client: aiohttp.ClientSession, url: str, body: dict[str, Any], secret: str
    ) -> tuple[int, bytes]:
        """(status, body) of the last try's answer; a broken connection on the last try is raised."""
        for attempt in range(self.config.max_retries + 1):
            is_last = attempt == self.config.max_retries
            headers = {"Authorization": f"Bearer {secret}"}
            if attempt:  # tells the interception endpoint that this repeats a turn and does not fork it
                headers["x-stainless-retry-count"] = str(attempt)
            try:
                async with client.post(url, json=body, headers=headers) as answer:
                    content = await answer.read()
                if is_last or (answer.status != 429 and answer.status < 500):
                    return answer.status, content
            except aiohttp.ClientError:
                if is_last:
                    raise
            await asyncio.sleep(min(_MAX_PAUSE_S, 0.25 * 2**attempt))
        raise AssertionError("unreachable: the last try returns or raises")


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
