"""Tiny models of many families in vLLM's engine, before and after weight updates. One process runs all of them:

    python -m tests.support.served_updates FOLDER CASE…     # a line of JSON for each case

A case is a family of `SERVED` or `MEASURED`, or one of `BYPASSES`. Its line contains the largest difference of the
engine's log-probabilities from those of transformers with the same weights after each step, or the error of the update.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.tiny_models import (
    CAPPED,
    COMMON,
    COMPOSITES,
    EXPERTS,
    GROUPS,
    PUBLISHED,
    SCALED,
    WINDOW_THEN_FULL,
    auto_model,
    publish,
)

COUNT = 24  # tokens that are compared
TOLERANCE = 1e-4  # both sides compute in float32
HALF_TOLERANCE = 0.2
"""Largest difference, over 23 tokens, of an engine in bfloat16 from float32 with the same weights. Versions differ by
more than `HALF_STALE`."""
HALF_STALE = 4.0
# what vLLM's CPU kernels take
SHAPE = COMMON | {"hidden_size": 64, "intermediate_size": 64, "pad_token_id": None}
HEAD = {"head_dim": 32}
MOE = {**EXPERTS, **HEAD, "moe_intermediate_size": 64}
SLIDING = {**HEAD, "sliding_window": 5}

DELTA = {
    **HEAD, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
MROPE = {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 6, 4], "mrope_interleaved": True,
    }
}  # fmt: skip
# every token uses all experts: in bfloat16, another rounding may choose another expert
ALL_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 8, "moe_intermediate_size": 64}

LLAMA4 = {
    "head_dim": 32, "intermediate_size_mlp": 64, "num_local_experts": 4, "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2, "layer_types": ["chunked_attention", "full_attention"],
    "attention_chunk_size": 128, "no_rope_layers": [1, 0], "floor_scale": 4, "attn_scale": 0.5,
}  # fmt: skip

SERVED: dict[str, dict[str, Any]] = {
    "qwen3": {**HEAD, "tie_word_embeddings": True},
    "llama": HEAD,
    "qwen2": {"num_attention_heads": 2},
    "mistral": SLIDING,
    "gemma": HEAD,
    "gemma3_text": {**SLIDING, "sliding_window_pattern": 2},
    "olmo2": {"num_attention_heads": 2},
    "olmo3": {"num_attention_heads": 2, "sliding_window": 5},
    "phi3": {"num_attention_heads": 2},
    "glm4": HEAD,
    "smollm3": {"num_attention_heads": 2},
    "starcoder2": {"num_attention_heads": 2},
    "ernie4_5": HEAD,
    "exaone4": {**SLIDING, "num_attention_heads": 2},
    "seed_oss": HEAD,
    "hunyuan_v1_dense": HEAD,
    "qwen3_moe": {**MOE, "num_experts": 8, "norm_topk_prob": True},
    "qwen2_moe": {
        **MOE, "num_attention_heads": 2, "num_experts": 8, "shared_expert_intermediate_size": 64,
    },
    "mixtral": {**HEAD, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "olmoe": {"num_attention_heads": 2, "num_experts": 8, "num_experts_per_tok": 2},
    "glm4_moe": {**MOE, **GROUPS},
    "dots1": {**MOE, **GROUPS},
    "gpt_oss": {**SLIDING, "num_experts_per_tok": 2, "num_local_experts": 8},
    "afmoe": {
        **MOE, **WINDOW_THEN_FULL, "num_experts": 8, "num_dense_layers": 1, "num_shared_experts": 1,
        "mup_enabled": True, "route_scale": 2.0,
        "score_func": "sigmoid",  # published; vLLM 0.32 reads it, transformers does not
    },
    "flex_olmo": {"num_attention_heads": 2, "num_experts": 8, "num_experts_per_tok": 2},
    "solar_open": {**MOE, "n_routed_experts": 8},
    "gemma4_text": {
        **SLIDING, **WINDOW_THEN_FULL, "global_head_dim": 32, "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 101,
    },
    # vLLM computes them otherwise without our `engine_options`
    "cohere2": {
        "num_attention_heads": 2, "logit_scale": 0.25, "sliding_window_pattern": 2, **WINDOW_THEN_FULL,
    },
    "llama4_text": LLAMA4,
    # layers that carry state
    "qwen3_5": DELTA,
    "qwen3_5_moe": {**DELTA, **ALL_EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **ALL_EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_next": {**DELTA, **ALL_EXPERTS, "shared_expert_intermediate_size": 64},
    "nemotron_h": {
        **HEAD, "layers_block_type": ["linear_attention", "full_attention", "mlp"], "num_hidden_layers": 3,
        "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8,
    },
    # with a tower that neither side loads
    "gemma3": {**SLIDING, "sliding_window_pattern": 2},
    "gemma4": {**SLIDING, "pad_token_id": 0, "global_head_dim": 32, "hidden_size_per_layer_input": 16},
    "internvl": HEAD,
    "llama4": LLAMA4,
    "mistral3": HEAD,
    "qwen3_vl": HEAD | MROPE,
    "qwen3_vl_moe": {**MOE, **MROPE, "num_experts": 8, "norm_topk_prob": True, "moe_intermediate_size": 128},
}  # fmt: skip
"""Families whose updates the tests compare, with changes that make their configuration (of text) small."""

TWO_HEADS = {"num_attention_heads": 2}
SOME_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 8}
CAPS = CAPPED | {"head_dim": 32}
MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8,
}  # fmt: skip
SHORT_CONVOLUTION = {
    **TWO_HEADS, "layer_types": ["conv", "full_attention"], "conv_dim": 64, "conv_dim_out": 64,
    "block_dim": 64, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
}  # fmt: skip
MEASURED: dict[str, dict[str, Any]] = {
    "granite": SCALED | TWO_HEADS,
    "granite_swa": SCALED | TWO_HEADS,
    "granitemoe": SCALED | TWO_HEADS | SOME_EXPERTS,
    "granitemoeshared": SCALED | TWO_HEADS | SOME_EXPERTS | {"shared_intermediate_size": 64},
    "cohere": {**TWO_HEADS, "logit_scale": 0.25, "use_qk_norm": True},
    "cohere2_moe": {
        **TWO_HEADS, **WINDOW_THEN_FULL, "logit_scale": 0.25, "num_experts": 8, "num_experts_per_tok": 2,
    },
    "gemma2": CAPS,
    "vaultgemma": CAPS,
    "phi": {**TWO_HEADS, "intermediate_size": 256},
    "stablelm": TWO_HEADS,
    "nemotron": HEAD,
    "apertus": TWO_HEADS,
    "arcee": TWO_HEADS,
    "cwm": HEAD,
    "glm": HEAD,
    "gpt_neox": TWO_HEADS,
    "helium": HEAD | TWO_HEADS,
    "hyperclovax": TWO_HEADS,
    "jais2": TWO_HEADS,
    "ministral": SLIDING,
    "ministral3": HEAD,
    "olmo": TWO_HEADS,
    "minimax_m2": {
        **HEAD, **SOME_EXPERTS, "rotary_dim": 32,
        "scoring_func": "sigmoid", "use_routing_bias": True,  # vLLM reads them, transformers does not
    },
    "nanochat": {**HEAD, "final_logit_softcapping": 2.0},
    "ernie4_5_moe": {
        **TWO_HEADS, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 64, "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
    },
    "hunyuan_v1_moe": {**HEAD, "num_experts": 8, "moe_topk": 2},
    "lfm2": SHORT_CONVOLUTION,
    "bamba": {**TWO_HEADS, **MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **TWO_HEADS, **MAMBA, "num_local_experts": 8, "num_experts_per_tok": 8, "shared_intermediate_size": 64,
        "layer_types": ["mamba", "attention"], "mamba_n_groups": 1,  # vLLM normalizes each group, transformers all
    },
}  # fmt: skip
"""Families without a test, because the tests have no time for all of them: compare them with the command above."""

HALF = frozenset({
    "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "nemotron_h",
    "lfm2", "bamba", "granitemoehybrid", "apertus",
})  # fmt: skip
"""Families that are compared in bfloat16: vLLM's CPU kernels compute layers with state in no other type, and vLLM keeps
the parameters of Apertus' activation in bfloat16 for every type of the model."""

EAGER = frozenset({"gemma2", "vaultgemma"})
"""Families whose attention scores are capped, which transformers computes with plain matrices only."""

BROADCAST = frozenset({"gpt_oss"})
"""Families that also receive a version from a trainer's process group."""

BYPASSES = {
    "a whole layer": "model.layers.1.mlp.down_proj.weight",
    "a part of a fused parameter": "model.layers.0.self_attn.k_proj.weight",
    "a norm": "model.norm.weight",
}
"""Tensors of a Qwen3 whose ``load_weights`` copies them past their loader, as vLLM's GPT-OSS does."""


def make_model(folder: Path, family: str, seed: int, **changes: Any) -> Any:
    """Save a random model, and return it in float32. ``changes``: of its text configuration."""
    import torch
    from transformers import AutoConfig

    torch.manual_seed(seed)
    parts = (SERVED | MEASURED)[family] | changes
    if family in COMPOSITES:
        parts = COMPOSITES[family] | {"text_config": COMPOSITES[family]["text_config"] | SHAPE | parts}
    else:
        parts = SHAPE | parts
    model = auto_model(family).from_config(
        AutoConfig.for_model(family, **parts), dtype=torch.float32,
        attn_implementation="eager" if family in EAGER else None,
    )  # fmt: skip
    buffers = [value for name, value in model.named_buffers() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for tensor in (*model.parameters(), *buffers):
            tensor.add_(torch.randn_like(tensor) * 0.2)
    if family in HALF:
        model.to(torch.bfloat16)
    model.save_pretrained(folder)
    if family in PUBLISHED:
        publish(model, folder, PUBLISHED[family])
    return model.float().eval()


@contextmanager
def reload_warnings() -> Iterator[list[str]]:
    """Yield a list that receives the warnings of vLLM's reload in the block, also if vLLM logs errors only."""
    from primerl_hpc.inference.worker.false_warnings import LOGGERS

    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING)
    try:
        yield messages
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)


class Engine:
    """vLLM in this process, with the arguments of a run's engine, for the model in ``folder``."""

    def __init__(self, folder: Path, dtype: str = "float32", *, is_composite: bool = False) -> None:
        from vllm import LLM, EngineArgs

        from primerl_hpc.inference.engine_args import engine_args
        from primerl_hpc.inference.server import family_config
        from primerl_hpc.inference.vllm_compat import parse_serve_args
        from primerl_hpc.recipe.load import parse_recipe

        recipe = parse_recipe(
            {
                "kind": "inference",
                "name": "served",
                "model": {"name": str(folder), "dtype": dtype},
                "inference": {
                    "max_model_len": 64,
                    "kv_cache_gib": 2**-6,
                    "extra_args": {"skip-tokenizer-init": True, "language-model-only": is_composite},
                },
            }
        )
        arguments = engine_args(
            recipe, model_path=str(folder), accelerator="cpu", model_config=family_config(recipe, str(folder))
        )
        self.llm = LLM.from_engine_args(EngineArgs.from_cli_args(parse_serve_args(arguments)))

    def update(self, body: dict[str, Any]) -> dict[str, Any]:
        """Update the engine's only worker, as the route does."""
        (prepared,) = self.llm.collective_rpc("primerl_prepare_update", args=(body,))
        assert "error" not in prepared, prepared
        return self.llm.collective_rpc("primerl_update_weights", args=(body,))[0]

    def difference(self, expected: list[float], ids: list[int]) -> float:
        """Return the largest difference of the log-probabilities of ``ids`` from the ``expected`` ones."""
        from vllm import SamplingParams, TokensPrompt

        parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompt = TokensPrompt(prompt_token_ids=ids)
        found = self.llm.generate(prompt, parameters, use_tqdm=False)[0].prompt_logprobs
        triples = zip(found[1:], ids[1:], expected, strict=True)
        return max(abs(by_token[token].logprob - value) for by_token, token, value in triples)

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


def updated(family: str, folder: Path) -> dict[str, Any]:
    """Return differences at version 0, after an update from a folder, after a broadcast, and with the first weights
    again."""
    import torch

    ids = torch.randint(
        0, COMMON["vocab_size"], (COUNT,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    models = [make_model(folder / str(seed), family, seed) for seed in (1, 2)]
    # before the engine is made: vLLM's Transformers backend changes the classes of families that it has no code for
    first, second = (logprobs(model, ids) for model in models)
    engine = Engine(
        folder / "1", "bfloat16" if family in HALF else "float32", is_composite=family in COMPOSITES
    )
    try:
        found: dict[str, Any] = {"start": engine.difference(first, ids)}
        with reload_warnings() as warnings:
            answer = engine.update({"path": str(folder / "2"), "version": 1})
        found |= {"folder": engine.difference(second, ids), "stale": engine.difference(first, ids)}
        engine.update({"path": str(folder / "1"), "version": 2})
        found["back"] = engine.difference(first, ids)
        if family in BROADCAST:
            with sending(models[1]) as body:
                engine.update(body)
            found["broadcast"] = engine.difference(second, ids)
        return found | {"num_parameters": answer["num_parameters"], "warnings": warnings}
    finally:
        engine.close()


def is_updated(family: str, found: dict[str, Any]) -> bool:
    """True if the engine computed transformers' log-probabilities after each step of `updated`."""
    tolerance = HALF_TOLERANCE if family in HALF else TOLERANCE
    steps = [found[step] for step in ("start", "folder", "back", "broadcast") if step in found]
    is_stale = found.get("stale", 0) <= (HALF_STALE if family in HALF else 100 * TOLERANCE)
    return bool(steps) and max(steps) <= tolerance and not is_stale


def logprobs(model: Any, ids: list[int]) -> list[float]:
    """Return the log-probabilities of all ``ids`` except the first, computed by transformers."""
    import torch

    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
    return [rows[place, token].item() for place, token in enumerate(ids[1:])]


@contextmanager
def sending(model: Any) -> Iterator[dict[str, Any]]:
    """Start a trainer that sends ``model``; yield the body of the update request."""
    import torch

    from primerl_hpc.common import env
    from primerl_hpc.run.access.keys import run_keys
    from primerl_hpc.run.rundir import RunDir
    from primerl_hpc.transport.store import serve_store
    from primerl_hpc.transport.weights.broadcast_group import BroadcastGroup
    from primerl_hpc.transport.weights.sources import RankAssignment, to_body

    store = serve_store(run_keys(RunDir(env.run_dir())), "weights", "127.0.0.1")

    def send() -> None:
        group = BroadcastGroup.join(store, "updates", rank=0, size=2, device=torch.device("cpu"))
        group.send(dict(model.state_dict()))
        group.send_end()

    thread = threading.Thread(target=send)
    thread.start()
    yield to_body(RankAssignment("127.0.0.1", store.port, "updates", 1, 2), 3)
    thread.join()


def bypassed(tensor: str, folder: Path) -> dict[str, Any]:
    """Return the error of an update if the model's own code copies ``tensor`` without its loader."""
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    for seed in (1, 2):
        make_model(folder / str(seed), "qwen3", seed)
    engine = Engine(folder / "1")
    plain = Qwen3ForCausalLM.load_weights
    Qwen3ForCausalLM.load_weights = copies_past_loader(plain, tensor)
    try:
        with reload_warnings() as warnings:
            return {"answer": engine.update({"path": str(folder / "2"), "version": 1})}
    except Exception as error:  # noqa: BLE001 (what it is, is the result)
        return {"error": f"{type(error).__name__}: {error}", "warnings": warnings}
    finally:
        Qwen3ForCausalLM.load_weights = plain
        engine.close()


def copies_past_loader(plain: Callable[..., Any], past: str) -> Callable[..., Any]:
    def load_weights(self: Any, weights: Iterator[tuple[str, Any]]) -> Any:
        parameters = dict(self.named_parameters())

        def others() -> Iterator[tuple[str, Any]]:
            for name, tensor in weights:
                if name == past:
                    target = parameters[name.replace("k_proj", "qkv_proj")].data
                    target[: len(tensor)].copy_(tensor)
                else:
                    yield name, tensor

        return plain(self, others())

    return load_weights


def main(folder: str, *cases: str) -> None:
    from primerl_hpc.inference.vllm_compat import prepare_cpu_models

    prepare_cpu_models()
    for case in cases:
        place = Path(folder) / case.replace(" ", "-")
        try:
            found = bypassed(BYPASSES[case], place) if case in BYPASSES else updated(case, place)
        except Exception as error:  # noqa: BLE001 (of one case; the others continue)
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"case": case} | found), flush=True)


def environment(run: Path) -> dict[str, str]:
    """Return the environment of the process that runs the cases, an engine of ``run``: a broadcast uses its keys."""
    from primerl_hpc.common import env
    from primerl_hpc.plan.engine_env import engine_env

    run.mkdir(parents=True, exist_ok=True)
    return dict(os.environ) | engine_env("cpu") | {
        env.RUN_DIR: str(run), env.ATTEMPT: "1", env.INCARNATION: "0",
        "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
