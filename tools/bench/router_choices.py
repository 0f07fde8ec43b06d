#!/usr/bin/env python3
"""Show how much of a mixture's mismatch KL comes from tokens that engine and trainer send to different experts.

    tools/bench/router_choices.py MODEL ROWS --out docs/measurements/router_choices.json      # two minutes on two cores

vLLM samples with MODEL (a folder of a Qwen3.5 mixture, such as a version of ``hybrid_rl.py --folder``) for the prompts
of ROWS (``sft.jsonl`` of that run) on the CPU in bfloat16, one request at a time and 12 tokens for each, also beyond
the end of an answer. The choices of its routers are recorded. The trainer computes these tokens twice: with its own
choices, and with those of the engine, as `trainer.router_replay` does on GPUs. ``differs`` are tokens with another set
of experts in at least one layer; ``logit_gap`` is the distance of the trainer's logits of the last expert that is
chosen and the first that is not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from machine import ROOT, describe_machine

sys.path.insert(0, str(ROOT))

from primerl_hpc.plan.engine_env import engine_env
from primerl_hpc.roles import mismatch


def sample(request: dict[str, Any], path: Path) -> None:
    """Write tokens, log-probabilities and experts [tokens, layers, k] of each completion."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    engine, chosen = mismatch.start_engine(request), list[np.ndarray]()
    plain = CPURouter._compute_routing

    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        weights, ids = plain(self, *args, **kwargs)
        chosen.append(ids.numpy().copy())
        return weights, ids

    CPURouter._compute_routing = compute
    parameters = SamplingParams(
        max_tokens=request["new_tokens"], ignore_eos=True, logprobs=0, detokenize=False
    )
    found = []
    for number, tokens in enumerate(mismatch.prompts_of(request)):
        chosen.clear()
        prompt = TokensPrompt(prompt_token_ids=tokens)
        parameters.seed = number
        output = engine.generate(prompt, parameters, use_tqdm=False)[0].outputs[0]
        layers = sum(len(ids) == len(tokens) for ids in chosen) if len(tokens) > 1 else 1
        steps = [np.stack(chosen[at : at + layers], 1) for at in range(0, len(chosen), layers)]
        experts = np.concatenate(steps)[: len(tokens) + len(output.token_ids) - 1]
        experts = np.concatenate([experts, np.zeros_like(experts[:1])])  # the last token is not computed
        values = [by[token].logprob for by, token in zip(output.logprobs, output.token_ids, strict=True)]
        found.append(
            {"tokens": [*tokens, *output.token_ids], "logprobs": values, "routed_experts": experts.tolist()}
        )
    path.write_text(json.dumps(found))


def prompts_of(request: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of each prompt, as the run's renderer writes them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(request["model"])
    with Path(request["rows"]).open() as file:
        texts = [json.loads(line)["prompt"] for line in file]
    chats = [[{"role": "user", "content": text}] for text in texts[: request["prompts"]]]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats
    ]


def compare(request: dict[str, Any], sampled: list[dict[str, Any]]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.overrides import TorchFunctionMode

    from primerl_hpc.trainer.parallel.mesh import make_world

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    recipe = mismatch.recipe_of(request, [])
    world = make_world(recipe.layout.trainer, torch.device("cpu"), local_rank=0, local_size=1)
    seen: list[tuple[Any, Any]] = []

    class Record(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in (torch.topk, torch.Tensor.topk):
                seen.append((args[0].detach().clone(), result.indices.clone()))
            return result

    own = [{key: item[key] for key in ("tokens", "logprobs")} for item in sampled]
    with Record():
        kl_own = mismatch.trainer_kl(recipe, world, own)
    layers = len(sampled[0]["routed_experts"][0])
    differs, gaps = [], []
    for index, item in enumerate(sampled):
        choices = seen[index * layers : (index + 1) * layers]
        theirs = np.sort(np.array(item["routed_experts"]), -1)  # [tokens, layers, k]
        ours = np.sort(torch.stack([ids for _, ids in choices], 1).numpy(), -1)
        scores = torch.stack([values for values, _ in choices], 1).log().sort(-1, descending=True).values
        k = ours.shape[-1]
        gap = (scores[..., k - 1] - scores[..., k]).numpy()
        other = (ours[: len(theirs)] != theirs).any(-1)
        other[-1] = False  # of the last token no choice of the engine is known
        differs.append(other.any(-1))
        gaps.append((gap[: len(theirs)][other], gap[: len(theirs)]))
    replayed = recipe.model_copy(
        update={"trainer": recipe.trainer.model_copy(update={"router_replay": True})}
    )
    for item in sampled:
        item["routed_experts"] = np.array(item["routed_experts"], np.uint8)
    kl_replayed = mismatch.trainer_kl(replayed, world, sampled)
    predicted = [len(values) for values in kl_own]
    # the choice at position t changes the distribution of token t + 1
    at = torch.from_numpy(np.concatenate([d[-n - 1 : -1] for d, n in zip(differs, predicted, strict=True)]))
    own_values, replayed_values = torch.cat(kl_own), torch.cat(kl_replayed)
    changed, every = (np.concatenate(parts) for parts in zip(*gaps, strict=True))
    return {
        "tokens": len(own_values),
        "differs": float(at.double().mean()),
        "own_choices": figures(own_values),
        "own_choices_where_equal": figures(own_values[~at]),
        "own_choices_where_different": figures(own_values[at]),
        "engines_choices": figures(replayed_values),
        "logit_gap_where_different": quantiles(changed),
        "logit_gap": quantiles(every),
    }


def figures(values: Any) -> dict[str, float]:
    return {"mean": float(values.mean()), "max": float(values.max())} if len(values) else {}


def quantiles(values: Any) -> dict[str, float]:
    return (
        {f"p{part}": float(np.quantile(values, part / 100)) for part in (50, 90, 100)} if len(values) else {}
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--prompts", type=int, default=800)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    parser.add_argument("--step", choices=("sample", "compare"), help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    request = {
        "model": str(options.model.resolve()), "dtype": options.dtype, "prompts": options.prompts,
        "rows": str(options.rows), "prompt_tokens": 48, "new_tokens": 12,
    }  # fmt: skip
    if options.step == "sample":
        sample(request, options.file)
    elif options.step == "compare":
        options.file.write_text(json.dumps(compare(request, json.loads(options.file.read_text()))))
    if options.step:
        mismatch.exit_process()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sampled.json"
        for step in ("sample", "compare"):
            command = [sys.executable, __file__, *sys.argv[1:], "--step", step, "--file", str(file)]
            subprocess.run(command, env=os.environ | engine_env("cpu"), check=True, stdout=subprocess.DEVNULL)
        found = json.loads(file.read_text())
    print(json.dumps(found, indent=1))
    if options.out is not None:
        import vllm

        command = f"tools/bench/router_choices.py MODEL ROWS --out {options.out}"
        record = {"command": command, **describe_machine(), "vllm": vllm.__version__, "dtype": options.dtype}
        options.out.write_text(json.dumps({**record, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
