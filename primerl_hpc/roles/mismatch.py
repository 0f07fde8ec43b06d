"""Measure mismatch KL between vLLM's engine and the trainer.

`checks/mismatch.py` calls each step in a process of its own (`common/interpreters.py`), so that the device's
memory is free for the next one:

- `data_types`: the device and its data types;
- `sample`: tokens that the engine generates with the arguments of a run, and their log-probabilities;
- `compare`: the trainer's log-probabilities of the same tokens, as mismatch KL.

Prompts are sentences if the model has a tokenizer, otherwise random tokens. Temperature is 1.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from primerl_hpc.common.files import read_json
from primerl_hpc.recipe.load import parse_recipe
from primerl_hpc.recipe.schema.recipe import Recipe

DTYPES = ("bfloat16", "float16", "float32")
FIRST_WITH_BFLOAT16 = 8  # compute capability of Ampere
SENTENCES = (
    "Explain in one paragraph why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "What is the sum of 48 and 87? Think step by step.",
    "Summarize the rules of chess for a beginner.",
    "Translate into French: The train leaves at half past seven.",
    "Name three causes of the First World War.",
    "A rectangle has sides of 3 cm and 5 cm. What is the length of its diagonal?",
    "Reverse the letters of the word reinforcement.",
)
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def accelerator() -> str:
    import torch

    return "gpu" if torch.cuda.is_available() else "cpu"


def data_types(model: str) -> dict[str, Any]:
    """Return the device and the types that it computes: vLLM's CPU kernels take layers with state in bfloat16 only."""
    import torch

    from primerl_hpc.common.model_families import family_of

    if accelerator() == "gpu":
        has_bfloat16 = torch.cuda.get_device_capability()[0] >= FIRST_WITH_BFLOAT16
        names = DTYPES if has_bfloat16 else DTYPES[1:]
        return {"accelerator": "gpu", "device": torch.cuda.get_device_name(), "dtypes": names}
    has_state = family_of(read_json(Path(model, "config.json")).get("model_type")).has_state
    return {"accelerator": "cpu", "device": "cpu", "dtypes": DTYPES[:1] if has_state else DTYPES}


def recipe_of(request: dict[str, Any], float32: list[str]) -> Recipe:
    """Return a recipe whose engine and trainer compute in the requested type."""
    model, new_tokens = request["model"], request["new_tokens"]
    engine = {"enable-prefix-caching": False, "skip-tokenizer-init": not has_tokenizer(Path(model))}
    return parse_recipe(
        {
            "kind": "rl",
            "name": "mismatch",
            "model": {"name": model, "dtype": request["dtype"], "accept_uncompared": True},
            "seq_len": request["prompt_tokens"] + new_tokens,
            "max_steps": 1,
            "environments": {"train": [{"id": "reverse-text"}]},
            "rollouts": {"sampling": {"max_tokens": new_tokens}},
            "inference": {"extra_args": engine},
            "trainer": {
                "param_dtype": request["dtype"],
                "float32": float32,
                "activation_checkpointing": "none",
            },
        }
    )


def has_tokenizer(model: Path) -> bool:
    return any((model / name).is_file() for name in TOKENIZERS)


def prompts_of(request: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of each prompt."""
    from transformers import AutoTokenizer

    model, count, length = Path(request["model"]), request["prompts"], request["prompt_tokens"]
    if has_tokenizer(model):
        tokenizer = AutoTokenizer.from_pretrained(model)
        texts = [tokenizer(sentence)["input_ids"][:length] for sentence in SENTENCES]
        return [texts[index % len(texts)] for index in range(count)]
    config = read_json(model / "config.json")
    vocabulary = config.get("text_config", config)["vocab_size"]
    numbers = random.Random(0)
    return [[numbers.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


def start_engine(request: dict[str, Any]) -> Any:
    """Return vLLM in this process, with the arguments of a run's engine."""
    from vllm import LLM, EngineArgs

    from primerl_hpc.inference.engine_args import engine_args
    from primerl_hpc.inference.server import family_config
    from primerl_hpc.inference.vllm_compat import parse_serve_args, prepare_cpu_models

    device, model = accelerator(), request["model"]
    if device == "cpu":
        prepare_cpu_models()
    recipe = recipe_of(request, [])
    config = family_config(recipe, model)
    arguments = engine_args(recipe, model_path=model, accelerator=device, model_config=config)
    return LLM.from_engine_args(EngineArgs.from_cli_args(parse_serve_args(arguments)))


def sample(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each completion: ``tokens`` of prompt and completion, ``logprobs`` of the completion."""
    from vllm import SamplingParams, TokensPrompt

    engine = start_engine(request)
    prompts = [TokensPrompt(prompt_token_ids=tokens) for tokens in prompts_of(request)]
    parameters = SamplingParams(
        max_tokens=request["new_tokens"], ignore_eos=True, logprobs=0, detokenize=False
    )
    found = []
    for output in engine.generate(prompts, parameters, use_tqdm=False):
        completion = output.outputs[0]
        assert completion.logprobs is not None and output.prompt_token_ids is not None  # both are requested
        values = [
            by[token].logprob for by, token in zip(completion.logprobs, completion.token_ids, strict=True)
        ]
        found.append({"tokens": [*output.prompt_token_ids, *completion.token_ids], "logprobs": values})
    engine.llm_engine.engine_core.shutdown()
    return found


def compare(request: dict[str, Any], sampled: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean and maximum of the mismatch KL for each entry of ``float32``."""
    import torch
    import torch.distributed as dist

    from primerl_hpc.trainer.parallel.mesh import make_world

    on_gpu = accelerator() == "gpu"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    device = torch.device("cuda" if on_gpu else "cpu")
    rows = []
    for names in request["float32"]:
        recipe = recipe_of(request, names)
        world = make_world(recipe.layout.trainer, device, local_rank=0, local_size=1)
        values = torch.cat(trainer_kl(recipe, world, sampled))
        figures = {"mismatch_kl": float(values.mean()), "mismatch_kl_max": float(values.max())}
        rows.append({"dtype": request["dtype"], "float32": names, "tokens": values.numel(), **figures})
    return rows


def trainer_kl(recipe: Recipe, world: Any, sampled: list[dict[str, Any]]) -> list[Any]:
    """Return the mismatch KL of each sampled token under the trainer's policy, as one tensor per sample.

    A sample may have ``routed_experts`` [tokens, layers, k], which the trainer then uses.
    """
    import torch

    from primerl_hpc.trainer.batch import make_batch
    from primerl_hpc.trainer.losses.step_loss import mismatch_kl
    from primerl_hpc.trainer.model.policy import build_policy
    from primerl_hpc.trainer.parallel.fsdp import reshard
    from primerl_hpc.transport.rollouts.micro_batch import MicroBatch

    policy = build_policy(recipe, Path(recipe.model.name), world)
    found = []
    for item in sampled:
        tokens, logprobs = item["tokens"], item["logprobs"]
        num_prompt = len(tokens) - len(logprobs)
        row = MicroBatch(
            input_ids=np.array(tokens, np.int32),
            loss_mask=np.arange(len(tokens)) >= num_prompt,
            advantages=np.ones(1, np.float32),
            inference_logprobs=np.concatenate([np.zeros(num_prompt), logprobs]).astype(np.float32),
            sample_lengths=np.array([len(tokens)], np.int64),
            temperatures=np.ones(1, np.float32),
            rl_weights=np.ones(1, np.float32),
            ref_kl_weights=np.zeros(1, np.float32),
            env_ids=np.zeros(1, np.int32),
            routed_experts=item.get("routed_experts"),
        )
        batch = make_batch([row], world.device)
        with torch.no_grad():
            logprobs_of_trainer, _ = policy(batch)
        reshard(policy)
        found.append(mismatch_kl(logprobs_of_trainer, batch.inference_logprobs).double().cpu())
    return found
