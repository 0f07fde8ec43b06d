"""Durations of an engine: one decode step, the prefill of prompts, and the time per token under a steady load.

    times = EngineTimes(shape, gpu_spec("H100-SXM"), EngineSetup(gpus=2, tensor_parallel=2, max_model_len=16384))
    times.decode_step(batch=64, context=4096)     # a Figure in seconds; its inputs are the parts of the step
    times.prefill(tokens=8192, length=2048)
    times.time_per_token(concurrency=64, prompt=1024, generated=4096)

The form is that of BLIS (inference-sim, blis.md of f90a1e3): FLOP and bytes of each part, plus a constant per
kernel. Its coefficients of utilization are curves here. The few constants are in `EngineConstants`; those that were
fitted are marked, and `tools/bench/planner_rows.py` shows their error on models that the fit did not see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from primerl_hpc.plan.predict.figure import Figure, Tier, add, multiply
from primerl_hpc.plan.predict.flops import visible_pairs
from primerl_hpc.plan.predict.hardware import GpuSpec
from primerl_hpc.plan.predict.layouts import EngineSetup
from primerl_hpc.plan.predict.shape import ModelShape
from primerl_hpc.plan.predict.timing.curves import FLOOR_S, Operations
from primerl_hpc.plan.predict.timing.layers import (
    ELEMENTWISE_SHARE,
    STATE_SHARE,
    LayerSplit,
    LayerWork,
    decode_attention_s,
    layers_of,
    pair_flops,
    seen,
)
from primerl_hpc.plan.predict.timing.network import Links

PARTS: tuple[str, ...] = ("matmuls", "experts", "attention", "small_kernels", "communication")
FOUR_BIT = ("fp4", "int4")
SOURCE = "curves: aiconfigurator-core 0.12.0; form: BLIS inference-sim f90a1e3; constants: EngineConstants"


@dataclass(frozen=True)
class EngineConstants:
    """The constants of the model. Fitted: on 557 vLLM rows of four models (H100, H200, B200); docs/durations.md has
    their error on the rows of three other models."""

    kernel_s: float = 3.3e-6
    """Time of a small kernel (norm, activation, routing) in a CUDA graph, besides its bytes. Fitted."""
    interference: float = 0.93
    """Share of a new prompt's prefill that delays each running sequence. Fitted."""
    eager_kernel_s: float = 2.0e-5
    """Host time of an operation without CUDA graphs, with Python's part. Judgment: 10 ms for a step of 28 layers."""
    eager_kernels: int = 18
    """Kernels of a layer in eager mode. Judgment, counted in vLLM's Llama and Qwen blocks."""
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=lambda: INTERVALS)
    """By regime: the 80 % interval is the value divided by the first factor to the value times the second."""


STEADY, DATA_PARALLEL, PROMPTS = "steady", "data_parallel", "prompts"
INTERVALS = {STEADY: (1.20, 1.24), DATA_PARALLEL: (1.1, 2.1), PROMPTS: (3.2, 1.11)}
"""10th and 90th percentile of measured / predicted in the rows of the same regime (848 vLLM rows of seven models):
tokens exchanged between data-parallel ranks, prefill of new prompts above `PROMPT_SHARE` of the time, and all others.
``tools/bench/planner_rows.py`` has the coverage on each model with percentiles from the other six."""
PROMPT_SHARE = 0.4
FIRST_TOKEN, FIRST_TOKEN_INTERVAL = 1.82, (1.44, 3.1)
"""Measured time to the first token / that of its operations: median, 10th and 90th percentile of the 23 vLLM rows of
planner_rows.csv with at most 8 sequences. Includes HTTP, scheduling, and waits for other prompts and running steps."""
CONSTANTS = EngineConstants()


@dataclass(frozen=True)
class EngineTimes:
    """Durations of one engine replica. ``gpus_per_node``: a tensor-parallel group above it uses the network."""

    shape: ModelShape
    gpu: GpuSpec
    setup: EngineSetup
    gpus_per_node: int = 8
    constants: EngineConstants = field(default=CONSTANTS)

    @cached_property
    def split(self) -> LayerSplit:
        setup = self.setup
        # 4-bit weights of mixtures are those of the routed experts (gpt-oss, Kimi K2); all others stay bfloat16
        dense = "bfloat16" if self.shape.is_mixture and setup.dtype in FOUR_BIT else setup.dtype
        return LayerSplit(
            setup.tensor_parallel,
            setup.expert_parallel,
            setup.data_parallel,
            dense,
            setup.dtype,
            setup.kv_dtype,
        )

    @cached_property
    def operations(self) -> Operations:
        return Operations(self.gpu)

    @cached_property
    def links(self) -> Links:
        return Links(self.operations, self.gpus_per_node)

    @cached_property
    def _layers(self) -> list[tuple[LayerWork, int]]:
        return layers_of(self.shape, self.split)

    # -- one step ----------------------------------------------------------------------------------

    def decode_step(self, batch: float, context: float, name: str = "time.engine.decode_step") -> Figure:
        """Return the duration of a step that adds one token to ``batch`` sequences of a data-parallel rank.

        ``context``: mean tokens of a sequence so far.
        """
        return self._figure(name, self.decode_parts(batch, context), {"batch": batch, "context": context})

    def decode_s(self, batch: float, context: float) -> float:
        """Return the value of `decode_step` alone, for callers that need many."""
        return sum(self.decode_parts(batch, context).values())

    def decode_parts(self, batch: float, context: float) -> dict[str, float]:
        """Return the parts of a decode step in seconds."""
        parts = dict.fromkeys(PARTS, 0.0)
        operations = self.operations
        for work, number in self._layers:
            parts["matmuls"] += number * work.matmul_s(operations, batch)
            parts["attention"] += number * decode_attention_s(operations, work, batch, context)
            self._add_common(parts, work, number, batch)
            # a step reads and writes the state of each sequence
            state = 2 * batch * work.state_bytes() / (self.gpu.hbm_bytes_per_s * STATE_SHARE)
            parts["attention"] += number * state
        return parts | self._head_and_host(batch, parts)

    def prefill(self, tokens: float, length: float, name: str = "time.engine.prefill") -> Figure:
        """Return the duration of processing ``tokens`` of prompts of ``length`` tokens each, on one rank."""
        return self._figure(name, self.prefill_parts(tokens, length), {"tokens": tokens, "length": length})

    def prefill_s(self, tokens: float, length: float) -> float:
        """Return the value of `prefill` alone."""
        return sum(self.prefill_parts(tokens, length).values())

    def prefill_parts(self, tokens: float, length: float) -> dict[str, float]:
        """Return the parts of a prefill in seconds. Prompts above ``max_num_batched_tokens`` take several steps."""
        chunks = max(1.0, tokens / self.setup.max_num_batched_tokens)
        rows, prompts = tokens / chunks, tokens / length
        parts = dict.fromkeys(PARTS, 0.0)
        operations = self.operations
        for work, number in self._layers:
            parts["matmuls"] += chunks * number * work.matmul_s(operations, rows)
            if (attention := work.layer.attention) is not None:
                pairs = visible_pairs([length], attention.window)
                if attention.index_topk is not None:
                    pairs = min(pairs, length * seen(attention, length))
                flops = prompts * pairs * pair_flops(attention, self.split.tensor)
                heads = max(1.0, prompts) * -(-attention.heads // self.split.tensor)
                parts["attention"] += number * operations.context_attention(length, heads, flops)
            chunk = dict.fromkeys(parts, 0.0)
            self._add_common(chunk, work, number, rows)
            for part, value in chunk.items():
                parts[part] += chunks * value
        return parts | self._head_and_host(prompts, parts)

    def first_token(self, prompt: float, batch: float = 0.0, name: str = "time.engine.first_token") -> Figure:
        """Return the time from a request to its first token in an engine with few other prompts.

        ``batch``: running sequences of the rank, for whose current step the prompt waits; 0: none.
        """
        parts = self.prefill_parts(prompt, prompt)
        parts["running_step"] = self.decode_s(batch, prompt) / 2 if batch else 0.0
        operations = add(f"{name}.operations", "s", self._part_figures(name, parts, {"prompt": prompt}))
        low, high = FIRST_TOKEN_INTERVAL
        factor = self.gpu.curve_factor
        rows = Figure(
            f"{name}.correction",
            FIRST_TOKEN,
            low / factor,
            high * factor,
            "1",
            "measured time to the first token / its operations",
            {},
            "vLLM rows of planner_rows.csv with at most 8 sequences",
            Tier.TABLE,
        )
        return multiply(name, "s", [operations, rows], source=SOURCE)

    def prompt_s(self, prompt: float) -> float:
        """Return the time for which a prompt occupies the engine while many of them are processed together."""
        most = max(1, int(self.setup.max_num_batched_tokens / max(1.0, prompt)))
        return self.prefill_s(most * prompt, prompt) / most / self.setup.data_parallel

    def _add_common(self, parts: dict[str, float], work: LayerWork, number: int, rows: float) -> None:
        """Add experts, small kernels and communication of ``number`` equal layers."""
        parts["experts"] += number * work.experts_s(self.operations, rows)
        moved = work.elementwise_bytes(rows) / (self.gpu.hbm_bytes_per_s * ELEMENTWISE_SHARE)
        parts["small_kernels"] += number * (moved + work.kernels * self.constants.kernel_s)
        parts["communication"] += number * self.layer_communication_s(work, rows)

    def layer_communication_s(self, work: LayerWork, rows: float) -> float:
        """Return the collectives of a layer: an all-reduce after the mixer and one after the feed-forward part; with
        experts over data-parallel ranks an all-gather of tokens and a reduce-scatter of results."""
        size = 2.0 * rows * self.shape.hidden
        tensor, split = self.split.tensor, self.split
        reduce = self.links.all_reduce(size, tensor)
        if work.experts is None or split.expert == 1 or split.data == 1:
            return 2 * reduce
        group = split.expert
        return (
            reduce
            + self.links.collective("all_gather", size * split.data, group)
            + self.links.collective("reduce_scatter", size * split.data, group)
        )

    def _head_and_host(self, sampled: float, parts: dict[str, float]) -> dict[str, float]:
        """Return the head with sampling, and what the host adds. Without CUDA graphs launches bound the step."""
        constants, tensor = self.constants, self.split.tensor
        vocab = -(-self.shape.vocab // tensor)
        head = self.operations.gemm(sampled, self.shape.hidden, vocab)
        # logits in float32 are written, gathered, and read three times by samplers
        moved = 4 * 4 * sampled * self.shape.vocab / (self.gpu.hbm_bytes_per_s * ELEMENTWISE_SHARE)
        gathered = self.links.collective("all_gather", 2 * sampled * self.shape.vocab, tensor)
        host = 0.0  # asynchronous scheduling hides the host; a fit of a constant per step and sequence gave 0
        if self.setup.enforce_eager:
            launches = len(self.shape.layers) * constants.eager_kernels * constants.eager_kernel_s
            host += max(0.0, launches - sum(parts.values()))
        return {"head": head + moved + gathered + FLOOR_S, "host": host}

    # -- a steady load -----------------------------------------------------------------------------

    def time_per_token(
        self, concurrency: float, prompt: float, generated: float, name: str = "time.engine.per_token"
    ) -> Figure:
        """Return the time between two tokens of a sequence while ``concurrency`` sequences of the replica run.

        Each sequence that ends makes room for a new prompt, whose prefill delays the others: per step
        ``batch / generated`` prompts of ``prompt`` tokens, of all data-parallel ranks if they share experts.
        """
        batch = max(1.0, concurrency / self.setup.data_parallel)
        # ranks that share experts wait for the prefill of each of them
        others = concurrency if self.split.expert > 1 and self.setup.data_parallel > 1 else batch
        prompts = max(0.0, others - 1) / generated * self.constants.interference
        parts = self.decode_parts(batch, prompt + generated / 2)
        parts["prefill_delay"] = prompts * self.prefill_s(prompt, prompt)
        inputs = {"batch": batch, "prompt": prompt, "generated": generated, "prompts_per_step": prompts}
        return self._figure(name, parts, inputs)

    def _regime(self, parts: Mapping[str, float]) -> str:
        if self.setup.data_parallel > 1:
            return DATA_PARALLEL
        return PROMPTS if parts.get("prefill_delay", 0.0) >= PROMPT_SHARE * sum(parts.values()) else STEADY

    def _part_figures(self, name: str, parts: dict[str, float], inputs: dict[str, float]) -> list[Figure]:
        tier = self.gpu.curve_tier
        return [
            Figure(f"{name}.{part}", value, value, value, "s", "sum over layers", inputs, SOURCE, tier)
            for part, value in parts.items()
        ]

    def _figure(self, name: str, parts: dict[str, float], inputs: dict[str, float]) -> Figure:
        figures = self._part_figures(name, parts, inputs)
        total = add(f"{name}.operations", "s", figures, source=SOURCE)
        regime = self._regime(parts)
        low, high = (factor * self.gpu.curve_factor for factor in self.constants.intervals[regime])
        correction = Figure(
            "time.engine.correction",
            1.0,
            1 / low,
            high,
            "1",
            "error on models outside the fit, by regime",
            {"regime": regime},
            SOURCE,
            Tier.TABLE,
        )
        return multiply(name, "s", [total, correction], source=SOURCE)
