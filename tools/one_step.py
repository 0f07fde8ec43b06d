#!/usr/bin/env python3
"""One step of RL on one page: sample, reward, advantages, pack, loss, update, publish.

    tools/one_step.py outputs/tiny/model outputs/one-step        # a model folder of tools/tiny-model, a new folder

A run does the same in three roles at once. Here transformers samples in place of vLLM, and difflib's ratio is the
reward in place of an environment of verifiers; all else is the code of a run.
"""

from __future__ import annotations

import argparse
import sys
from difflib import SequenceMatcher
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from primerl_hpc.orchestrator.batches.batcher import BatchBuilder
from primerl_hpc.orchestrator.rollout_data import Group, Rollout, Sample, Split
from primerl_hpc.orchestrator.scoring.scoring import Scorer
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.trainer.parallel.mesh import make_world
from primerl_hpc.trainer.train_step import build_trainer
from primerl_hpc.trainer.watchdog import Watchdog
from primerl_hpc.trainer.weights.filesystem import publish_policy

WORDS = ("ab", "cde", "fghi", "jklmn", "opqrst", "uvwxyz", "banana", "reverse")


def sample_group(engine, tokenizer, word: str, number: int, size: int) -> Group:
    """Sample ``size`` replies to the prompt ``word``, and compare each with the word in reverse."""
    chat = [{"role": "user", "content": word}]
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    prompt = tokens["input_ids"].repeat(size, 1)
    replies = engine.generate(prompt, do_sample=True, top_k=0, max_new_tokens=12)[:, prompt.shape[1] :]
    rollouts = [make_rollout(engine, tokenizer, word, prompt[0], reply) for reply in replies]
    return Group(
        number, Split.TRAIN, 0, number, size, 0, 0, results=rollouts, versions=[engine.version] * size
    )


@torch.no_grad()
def make_rollout(engine, tokenizer, word: str, prompt: torch.Tensor, reply: torch.Tensor) -> Rollout:
    is_end = reply == tokenizer.eos_token_id
    reply = reply[: int(is_end.nonzero()[0]) + 1] if is_end.any() else reply  # the rest is padding
    ids, begin = torch.cat([prompt, reply]), len(prompt)
    logprobs = engine(ids[None]).logits[0].float().log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    mask = np.arange(len(ids)) >= begin
    inference_logprobs = np.where(mask, np.concatenate([[0.0], logprobs.numpy()]), 0.0).astype(np.float32)
    sample = Sample(ids.numpy().astype(np.int32), mask, inference_logprobs, temperature=1.0)
    answer = tokenizer.decode(reply, skip_special_tokens=True)
    reward = SequenceMatcher(None, answer.strip(), word[::-1]).ratio()
    return Rollout(reward, [sample], len(reply), begin, num_turns=1, is_truncated=not is_end.any())


def main(model: str, folder: str) -> None:
    overrides = [f"model.name={model}", "scheduler.warmup_steps=0"]
    recipe = load_recipe("reverse_text/tiny", overrides=overrides).recipe
    run, step, size = RunDir(Path(folder)), 1, recipe.rollouts.group_size
    tokenizer = AutoTokenizer.from_pretrained(model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = make_world(recipe.layout.trainer, torch.device("cpu"), local_rank=0, local_size=1)
    watchdog = Watchdog(run, "trainer-0", rank=0, size=1, timeout_s=600)
    trainer = build_trainer(recipe, model, world, watchdog)
    builder = BatchBuilder(
        recipe.rollouts, Scorer(recipe), seq_len=recipe.seq_len, num_ranks=1, env_names=["words"]
    )

    engine = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    engine.version = step - 1
    for number in range(recipe.rollouts.batch_size // size):  # sample, score, advantages
        builder.add(sample_group(engine, tokenizer, WORDS[number % len(WORDS)], number, size))
    batch = builder.next_batch(step, min_fresh_version=step - 1)
    assert batch is not None, "all replies to each word have the same reward"
    (rows,) = builder.pack(batch).ranks
    result = trainer.train_step(step, rows, batch.info.env_names)  # forward, loss, backward, update
    publish_policy(run, trainer, step)
    engine = AutoModelForCausalLM.from_pretrained(run.weights_step(step), dtype=torch.float32)
    engine.version = step  # samples the next batch

    names = ("loss/mean", "mismatch_kl/all/mean", "optim/grad_norm")
    print(
        f"step {step}: {len(batch.samples)} samples in {len(rows)} rows, mean reward {batch.mean_reward:.3f}"
    )
    print({name: result.metrics[name] for name in names})
    watchdog.pause()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for argument in ("model", "folder"):
        parser.add_argument(argument)
    main(**vars(parser.parse_args()))
