"""An engine in plain transformers, started by the supervisor in place of vLLM (`rl_run.py --engine transformers`).

    python tools/bench/plain_engine.py -m primerl_hpc.roles.inference RUN_DIR PHASE NAME

For machines with a GPU and without vLLM: everything else of a run is real, and so are the tokens, their
log-probabilities and the weight updates. The engine speaks the protocol of our vLLM server: pause, load, resume, sleep,
metrics, token route, TLS and key. The requests that wait when a batch begins are generated together. Supports the
transports `filesystem` and `delta`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from primerl_hpc.common import env  # noqa: E402
from primerl_hpc.common.errors import DataError  # noqa: E402
from primerl_hpc.inference.server import choose_start_weights  # noqa: E402
from primerl_hpc.inference.turns import wait_for_turn  # noqa: E402
from primerl_hpc.inference.worker.extension import open_folder  # noqa: E402
from primerl_hpc.inference.worker.mirror import Mirror  # noqa: E402
from primerl_hpc.roles.start import RoleProcess, start_role  # noqa: E402
from primerl_hpc.run.access.keys import run_keys  # noqa: E402
from primerl_hpc.run.endpoints import publish_endpoint  # noqa: E402
from primerl_hpc.run.ports import bind_listener, listen_host  # noqa: E402
from primerl_hpc.transport.weights.sources import DeltaChain, RankAssignment, from_body  # noqa: E402

MAX_RUNNING = 256


@dataclass(eq=False)
class Sequence:
    prompt: list[int]
    max_tokens: int
    temperature: float
    stop: frozenset[int]
    ended: asyncio.Future[tuple[list[int], list[float]]]


class PlainEngine:
    """A thread that generates. It holds ``lock`` during each forward, so a caller that holds it may change weights."""

    def __init__(self, model: Any, device: Any, mirror: Path) -> None:
        self.model, self.device, self.mirror = model, device, mirror
        self.lock, self.may_run = threading.Lock(), threading.Event()
        self.may_run.set()
        self.waiting: list[Sequence] = []
        self.num_running, self.generated = 0, 0
        threading.Thread(target=self._run, daemon=True).start()

    def load(self, body: dict[str, Any]) -> int:
        """Load a policy version, and move the model to its device. Raises DataError if the files are damaged."""
        import torch

        source, version = from_body(body)
        if isinstance(source, RankAssignment):
            raise DataError("this engine cannot join the trainer's group", location=source.group)
        folder = (
            Mirror(self.mirror).update_to(source, version) if isinstance(source, DeltaChain) else Path(source)
        )
        _, tensors = open_folder(folder, lambda _: None)
        with self.lock, torch.no_grad():
            self.model.to(self.device)
            parameters = dict(self.model.named_parameters(remove_duplicate=False))
            missing = set(self.model.state_dict()) - {
                name for name, value in tensors if _copy(parameters, name, value)
            }
            if missing - set(getattr(self.model, "_tied_weights_keys", None) or ()):
                raise DataError(
                    f"tensors are missing: {', '.join(sorted(missing)[:3])}", location=str(folder)
                )
        return version

    def sleep(self) -> None:
        """Free the accelerator. The caller has paused the engine."""
        import torch

        with self.lock:
            self.model.to("cpu")
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _run(self) -> None:
        loop_pause = threading.Event()
        while True:
            batch = self.waiting[:MAX_RUNNING]
            if not batch:
                loop_pause.wait(0.005)
                continue
            del self.waiting[: len(batch)]
            self.num_running = len(batch)
            try:
                results: list[Any] = self._generate(batch)
            except Exception as error:  # noqa: BLE001 (every request of the batch reports it)
                results = [error] * len(batch)
            self.num_running = 0
            for sequence, result in zip(batch, results, strict=True):
                sequence.ended.get_loop().call_soon_threadsafe(_settle, sequence.ended, result)

    def _generate(self, batch: list[Sequence]) -> list[tuple[list[int], list[float]]]:
        import torch

        longest = max(len(sequence.prompt) for sequence in batch)
        padding = [longest - len(sequence.prompt) for sequence in batch]
        rows = [[0] * pad + sequence.prompt for pad, sequence in zip(padding, batch, strict=True)]
        ids = torch.tensor(rows, device=self.device)
        mask = torch.arange(longest, device=self.device) >= torch.tensor(padding, device=self.device)[:, None]
        temperatures = torch.tensor([sequence.temperature for sequence in batch], device=self.device)[:, None]
        results: list[tuple[list[int], list[float]]] = [([], []) for _ in batch]
        running, cache = set(range(len(batch))), None
        while running:
            self.may_run.wait()
            with self.lock, torch.no_grad():
                positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
                out = self.model(
                    input_ids=ids,
                    attention_mask=mask.long(),
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
                cache = out.past_key_values
                logprobs = torch.log_softmax(out.logits[:, -1].float() / temperatures, dim=-1)
                ids = torch.multinomial(logprobs.exp(), 1)
                tokens, found = ids[:, 0].tolist(), logprobs.gather(1, ids)[:, 0].tolist()
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            for index in list(running):
                results[index][0].append(tokens[index])
                results[index][1].append(found[index])
                sequence = batch[index]
                if tokens[index] in sequence.stop or len(results[index][0]) == sequence.max_tokens:
                    running.discard(index)
            self.generated += len(batch)
        return results


def _copy(parameters: dict[str, Any], name: str, value: Any) -> str | None:
    if name in parameters:
        parameters[name].copy_(value)
        return name
    return None


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():  # the client disconnected
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


def engine_app(engine: PlainEngine, state: dict[str, Any], authorization: str, policy: str) -> Any:
    """Return the aiohttp application with the routes of our vLLM server that a run uses."""
    from aiohttp import web

    @web.middleware
    async def check_key(request: web.Request, handler: Any) -> Any:
        if request.headers.get("authorization") != authorization:
            return web.json_response({"error": "missing or wrong API key"}, status=401)
        return await handler(request)

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        parameters = body["sampling_params"]
        future = asyncio.get_running_loop().create_future()
        sequence = Sequence(
            body["token_ids"],
            parameters.get("max_tokens") or 16,
            max(parameters.get("temperature", 1.0), 1e-3),
            frozenset()
            if parameters.get("ignore_eos")
            else frozenset(parameters.get("stop_token_ids") or ()),
            future,
        )
        engine.waiting.append(sequence)
        tokens, logprobs = await future
        content = [
            {"token": f"token_id:{token}", "logprob": value}
            for token, value in zip(tokens, logprobs, strict=True)
        ]
        reason = "stop" if tokens[-1] in sequence.stop else "length"
        choice = {"index": 0, "token_ids": tokens, "finish_reason": reason, "logprobs": {"content": content}}
        return web.json_response({"request_id": "r", "choices": [choice]})

    async def pause(_: web.Request) -> web.Response:
        engine.may_run.clear()
        state["paused"] = True
        return web.json_response({"paused": True})

    async def resume(_: web.Request) -> web.Response:
        if not state["asleep"]:
            state["paused"] = False
            engine.may_run.set()
        return web.json_response({"paused": state["paused"]})

    async def sleep(_: web.Request) -> web.Response:
        engine.may_run.clear()
        await asyncio.to_thread(engine.sleep)
        state["paused"] = state["asleep"] = True
        return web.json_response({"asleep": True})

    async def update(request: web.Request) -> web.Response:
        try:
            state["version"] = await asyncio.to_thread(engine.load, await request.json())
        except (DataError, OSError) as error:
            return web.json_response({"error": str(error)}, status=422)
        if state["asleep"]:
            state["paused"] = state["asleep"] = False
            engine.may_run.set()
        return web.json_response({"version": state["version"]})

    async def show_state(_: web.Request) -> web.Response:
        return web.json_response(state)

    async def metrics(_: web.Request) -> web.Response:
        lines = (
            f"vllm:num_requests_running {engine.num_running}",
            f"vllm:num_requests_waiting {len(engine.waiting)}",
            f"vllm:kv_cache_usage_perc {engine.num_running / MAX_RUNNING}",
            f"vllm:generation_tokens_total {engine.generated}",
        )
        return web.Response(text="\n".join(lines) + "\n")

    async def list_models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": policy, "object": "model"}]})

    app = web.Application(middlewares=[check_key])
    posts = {
        "/inference/v1/generate": generate,
        "/pause": pause,
        "/resume": resume,
        "/sleep": sleep,
        "/update_weights": update,
    }
    app.add_routes([web.post(path, handler) for path, handler in posts.items()])
    app.add_routes([web.get("/primerl/state", show_state), web.get("/metrics", metrics)])
    app.add_routes([web.get("/health", show_state), web.get("/v1/models", list_models)])
    return app


def serve_engine(role: RoleProcess) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    if role.recipe.layout.takes_turns:
        wait_for_turn(role.run, role.process)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start = choose_start_weights(role.run, role.phase.model_path, role.process)
    dtype = getattr(torch, role.recipe.model.dtype)
    model = AutoModelForCausalLM.from_pretrained(start.path, dtype=dtype).to(device).eval()
    start.check()
    start.release()
    with tempfile.TemporaryDirectory() as mirror:
        engine = PlainEngine(model, device, Path(mirror))
        asyncio.run(_serve(role, engine, start.version))


async def _serve(role: RoleProcess, engine: PlainEngine, version: int) -> None:
    from aiohttp import web

    keys, policy = run_keys(role.run), role.recipe.policy_name
    state = {"process": role.process, "attempt": env.attempt(), "incarnation": env.incarnation()}
    state |= {"version": version, "paused": False, "asleep": False}
    listener = bind_listener(listen_host(role.plan.num_hosts), role.run.last_port(role.process))
    host, port = listener.getsockname()[:2]
    app = engine_app(engine, state, f"Bearer {keys.api_key}", policy)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    context = keys.server_context(role.process, host)
    await web.SockSite(runner, listener, ssl_context=context, backlog=4096).start()
    publish_endpoint(
        role.run, role.process, f"https://{host}:{port}", model=policy, version=version, admin=True
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()


if __name__ == "__main__":
    sys.exit(start_role("inference", sys.argv[3:], serve_engine))
