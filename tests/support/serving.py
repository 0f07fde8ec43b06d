"""A real engine, router and environment server of one run with a tiny model, started once for all tests that use them.

`Serving` does what the supervisor would do: remove the endpoint of a dead process, start its next incarnation.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from primerl_hpc.common import env
from primerl_hpc.common.names import Role
from primerl_hpc.common.waiting import wait_until
from primerl_hpc.plan.engine_env import engine_env
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.endpoints import read_endpoint
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import PATIENCE_S, end_role, make_plan, make_tiny_model, process_plan, start_role


def make_recipe(model: Path) -> dict[str, Any]:
    return {
        "kind": "rl",
        "name": "serving",
        "model": {"name": str(model), "dtype": "float32", "renderer": {"name": "chatml"}},
        "seq_len": 128,
        "max_steps": 1,
        "environments": {
            "train": [{"id": "reverse-text"}],
            "eval": [
                {
                    "id": "reverse-text",
                    "name": "held-out",
                    "args": {"split": "test", "task": {"judges": [judge_of(model)]}},
                }
            ],
        },
        "judge": {"model": {"name": str(model)}},
        "rollouts": {"batch_size": 8, "group_size": 4, "sampling": {"max_tokens": 12}},
        # load tracking: a test can see that a request has arrived, also at a paused engine
        "inference": {
            "kv_cache_gib": 0.0625,
            "max_model_len": 512,
            "extra_args": {"enable-server-load-tracking": True},
        },
    }


def judge_of(model: Path) -> dict[str, Any]:
    """verifiers' judge with a reference answer; its prompt is short enough for the tiny model.

    It judges every rollout, even an empty reply, and the model never produces a verdict.
    """
    prompt = model.parent / "judge.txt"
    prompt.parent.mkdir(parents=True, exist_ok=True)
    prompt.write_text("Is {response} {answer}?")
    return {
        "id": "reference",
        "prompt": str(prompt),
        "view": "full_trace",
        "choices": ["correct", "incorrect"],
        "sampling": {"max_completion_tokens": 4},
    }


class Serving:
    def __init__(
        self,
        folder: Path,
        *roles: Role,
        layout: dict[str, Any] | None = None,
        model: Path | None = None,
        recipe: dict[str, Any] | None = None,
    ) -> None:
        """``roles``: by default engine, router and two environment servers; ``layout``: of inference; ``model``: by
        default a tiny one; ``recipe``: other keys of it."""
        self.model = model or make_tiny_model(folder / "tiny", rows=1) / "model"
        self.run = RunDir(folder / "run")
        roles = roles or (Role.INFERENCE, Role.ROUTER, Role.ENV_SERVER, Role.ENV_SERVER)
        processes = [process_plan(role, roles[:place].count(role)) for place, role in enumerate(roles)]
        values = make_recipe(self.model) | {"layout": {"inference": layout or {}}} | (recipe or {})
        self.recipe = make_plan(self.run.root, values, processes=processes).phases[0].recipe
        self.keys = run_keys(self.run)
        self.client = httpx.Client(
            verify=self.keys.client_context(), headers=self.keys.headers, timeout=PATIENCE_S, trust_env=False
        )
        self.processes: dict[str, subprocess.Popen] = {}
        self.incarnations: dict[str, int] = {}
        self.home = folder / "home"
        self.home.mkdir()

    def start(self, *names: str) -> None:
        """Start the next incarnation of processes and wait until all are published."""
        for name in names:
            self.incarnations[name] = self.incarnations.get(name, -1) + 1
            more = {env.INCARNATION: str(self.incarnations[name])}
            more |= engine_env("cpu") if name.startswith(("inference", "prefill")) else {}
            more |= {"HOME": str(self.home)} if name.startswith("env_server") else {}
            self.processes[name] = start_role(self.run, "main", name, **more)
        for name in names:
            wait_until(
                lambda name=name: read_endpoint(self.run, name) or self._fail_if_dead(name),
                what=f"{name} to publish its endpoint",
                timeout_s=PATIENCE_S,
            )

    def kill(self, name: str) -> None:
        """Send SIGKILL to the process and its children."""
        end_role(self.processes.pop(name))
        self.run.endpoint(name).unlink(missing_ok=True)

    def terminate(self, name: str) -> int:
        """Send SIGTERM to the process only; return its exit code."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE_S)
        self.run.endpoint(name).unlink(missing_ok=True)
        return code

    def stop(self) -> None:
        for process in self.processes.values():
            end_role(process)

    def room(self, tmp_path: Path) -> Path:
        """Return a folder for one test inside the run directory: an engine loads weights only from there."""
        folder = self.run.root / "tests" / tmp_path.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def url(self, name: str) -> str:
        endpoint = read_endpoint(self.run, name)
        assert endpoint is not None
        return endpoint["url"]

    def port(self, name: str) -> int:
        port = urlsplit(self.url(name)).port
        assert port is not None
        return port

    def log(self, name: str) -> str:
        return (self.run.attempt_logs(1) / f"{name}.log").read_text()

    def async_client(self) -> httpx.AsyncClient:
        verify, headers = self.keys.client_context(), self.keys.headers
        return httpx.AsyncClient(verify=verify, headers=headers, timeout=PATIENCE_S, trust_env=False)

    def post(self, name: str, route: str, body: dict[str, Any]) -> httpx.Response:
        return self.client.post(f"{self.url(name)}{route}", json=body)

    def get(self, name: str, route: str) -> Any:
        return self.client.get(f"{self.url(name)}{route}").json()

    def generate(
        self, prompt: list[int], max_tokens: int = 16, *, name: str = "router-0", model: str | None = None
    ) -> dict[str, Any]:
        """Return sampled tokens and their log-probabilities from the token route. ``model``: an adapter's name."""
        parameters = {
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "logprobs": 1,
            "seed": 1,
            "ignore_eos": True,
        }
        body = {"token_ids": prompt, "sampling_params": parameters} | ({"model": model} if model else {})
        answer = self.post(name, "/inference/v1/generate", body)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        return {"token_ids": choice["token_ids"], "logprobs": logprobs}

    def wait_for_router(self) -> None:
        """Wait until a request succeeds."""

        def look() -> bool:
            answer = self.post(
                "router-0", "/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 1}}
            )
            return answer.status_code == 200

        wait_until(look, what="the router to have an engine", timeout_s=PATIENCE_S)

    def _fail_if_dead(self, name: str) -> None:
        if (code := self.processes[name].poll()) is not None:
            raise AssertionError(f"{name} ended with {code}:\n{self.log(name)[-3000:]}")


def hf_logprobs(
    model: Path, prompt: list[int], completion: list[int], *, adapter: Path | None = None
) -> list[float]:
    """Return the log-probabilities of ``completion`` after ``prompt``, computed by transformers in float32.

    ``adapter``: the folder of an adapter that PEFT applies.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        network = PeftModel.from_pretrained(network, adapter)
    with torch.no_grad():
        logits = network(torch.tensor([prompt + completion])).logits[0]
    logprobs = torch.log_softmax(logits, -1)
    first = len(prompt) - 1
    return [logprobs[first + i, token].item() for i, token in enumerate(completion)]


def save_variant(model: Path, out: Path, seed: int) -> Path:
    """Return a folder with the model and other random weights of a larger spread."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
    network.save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)
    return out
