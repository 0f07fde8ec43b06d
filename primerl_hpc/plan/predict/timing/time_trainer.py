"""Duration of a training step: forward, backward, recomputation, head, communication and optimizer.

    times = TrainerTimes(shape, gpu_spec("H100-SXM"), TrainerSetup(ranks=8, ranks_per_node=8, shard=8, seq_len=16384))
    times.step(lengths=[2048] * 8)      # a Figure in seconds; a row of 16,384 tokens is eight samples of 2,048

Matrix products, attention and experts use the measured utilization of `curves` by rows and context; backward takes the
products of forward twice, or once for frozen weights. Communication of FSDP runs during computation; what exceeds it is
exposed. The constants are in `TrainerConstants`; those that were fitted are marked, and `tools/bench/planner_rows.py`
shows their error on models that the fit did not see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from primerl_hpc.plan.predict.architectures.parts import Layer
from primerl_hpc.plan.predict.figure import Figure, Tier, add, multiply
from primerl_hpc.plan.predict.flops import visible_pairs
from primerl_hpc.plan.predict.hardware import GpuSpec
from primerl_hpc.plan.predict.layouts import DTYPE_BYTES, TrainerSetup
from primerl_hpc.plan.predict.shape import ModelShape
from primerl_hpc.plan.predict.timing.curves import Operations
from primerl_hpc.plan.predict.timing.layers import (
    ELEMENTWISE_SHARE,
    STATE_SHARE,
    LayerSplit,
    LayerWork,
    layers_of,
    pair_flops,
)
from primerl_hpc.plan.predict.timing.network import Links

SOURCE = "curves: aiconfigurator-core 0.12.0; constants: TrainerConstants, fitted on prime-rl benchmarks of 2026-01"
ATTENTION_BACKWARD_FLOPS = 2.5
"""Products of attention in backward for each of forward: FlashAttention recomputes QKᵀ (arXiv 2307.08691, §3.1)."""
PARTS = (
    "matmuls",
    "attention",
    "experts",
    "small_kernels",
    "adapters",
    "head",
    "communication",
    "optimizer",
    "host",
)


@dataclass(frozen=True)
class TrainerConstants:
    """The constants of the model. Fitted: on rows of prime-rl with four models on H100 and H200; docs/durations.md has
    their errors."""

    attention_kernel: str = "flash_attention_2"
    """Implementation of attention, as ``model.attention``."""
    attention_backward: float = 1.32
    """Time of a FLOP of attention in backward, relative to forward. Fitted."""
    experts: float = 2.5
    """Time of grouped expert products with permutation, relative to vLLM's fused kernels. Fitted."""
    small_kernels: float = 1.65
    """Bytes of norms, activations and residuals, relative to one read and write each. Fitted."""
    layer_s: float = 1.25e-3
    """Time of a layer's forward in which the GPU waits for the host. Fitted."""
    exposed: float = 0.1
    """Share of FSDP's communication that computation never hides: first and last layers. Judgment."""
    head_dtype: str = "bfloat16"
    """Type in which the head is multiplied; prime-rl's RL trainer used float32."""
    factor: float = 1.15
    """The 80 % interval is the value divided and multiplied by this. Calibrated on models outside the fit."""


ATTENTION_TIME = {"hopper": 1.75, "blackwell": 3.6}
"""Time of FlashAttention 2, and of PyTorch's sdpa, which has its kernels, relative to those of the curves, by GPU
architecture; 1 where the curves are of FlashAttention 2. Hopper: 166 s against 107 s for one step of INTELLECT-3 at
65,536 tokens on eight H200, of which attention takes about 79 s; Blackwell: dense rows of B200 (prime-rl, 2026-01)."""
EAGER_ATTENTION_TIME = 4.0
"""Time of attention without a fused kernel, relative to FlashAttention 2. Judgment."""
OUTSIDE_FIT = 1.3
"""Factor on the interval for architectures other than Hopper, whose rows were not fitted. Judgment."""
EAGER_SMALL_KERNELS = 1.5
"""Bytes of small kernels without torch.compile, relative to compiled ones. Judgment."""
FP8_TILES = {"blockwise": 128, "mxfp8": 32}
"""Matrices whose sizes are not multiples of the tile are multiplied in bfloat16 (docs/training.md)."""
FP8_BYTES = 3
"""Bytes that are read and written to round a value to FP8. Products in FP8 take the time of engines' kernels, which is
not verified for training: no such kernel of this trainer has run."""
CONSTANTS = TrainerConstants()


@dataclass(frozen=True)
class TrainerTimes:
    """Durations of a trainer."""

    shape: ModelShape
    gpu: GpuSpec
    setup: TrainerSetup
    constants: TrainerConstants = field(default=CONSTANTS)

    @cached_property
    def operations(self) -> Operations:
        return Operations(self.gpu)

    @cached_property
    def links(self) -> Links:
        return Links(self.operations, self.setup.ranks_per_node)

    @cached_property
    def _layers(self) -> list[tuple[LayerWork, LayerWork, int]]:
        """Distinct layers: with matrices divided by tensor parallelism, and undivided, as routed experts and small
        kernels need them, which work on a part of the tokens instead (`trainer.parallel.tensor`); and their number."""
        expert, tile = self.setup.expert_parallel, FP8_TILES.get(self.setup.fp8)
        dtype = "bfloat16" if tile is None or "fp8" not in self.gpu.peak_flops else "fp8"
        types = {"dtype": dtype, "expert_dtype": dtype, "tile": tile or 1}
        divided = layers_of(self.shape, LayerSplit(self.setup.tensor_parallel, expert, expert, **types))
        undivided = layers_of(self.shape, LayerSplit(1, expert, expert, **types))
        return [(work, full, number) for (work, number), (full, _) in zip(divided, undivided, strict=True)]

    # -- a step ------------------------------------------------------------------------------------

    def step(self, lengths: Sequence[float] | None = None, name: str = "time.trainer.step") -> Figure:
        """Return the duration of a step of ``micro_batches`` rows on each rank.

        ``lengths``: tokens of the samples of one row of a context-parallel group; None: one sample of ``seq_len``.
        """
        return self._figure(name, self.step_parts(lengths))

    def step_s(self, lengths: Sequence[float] | None = None) -> float:
        """Return the value of `step` alone."""
        return sum(self.step_parts(lengths).values())

    def step_parts(self, lengths: Sequence[float] | None = None) -> dict[str, float]:
        """Return the parts of a step in seconds."""
        setup = self.setup
        lengths = [float(setup.seq_len)] * setup.micro_rows if lengths is None else list(lengths)
        tokens = sum(lengths) / setup.context_parallel
        micro: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        for work, full, number in self._layers:
            for part, value in self._layer_parts(work, full, tokens, lengths).items():
                micro[part] += number * value
        micro["head"] = self._head_s(tokens)
        computed = sum(micro.values())
        micro["communication"] = self._inside_layers_s(tokens) + self._exposed_s(self.gathers_s(), computed)
        parts = {part: value * setup.micro_batches for part, value in micro.items()}
        # gradients are reduced with the last micro-batch only
        parts["communication"] += self._exposed_s(self.reductions_s(), computed)
        parts["optimizer"] = self.optimizer_s()
        return parts

    def optimizer(self, name: str = "time.trainer.optimizer") -> Figure:
        """Return the duration of the optimizer's update alone."""
        return self._figure(name, {"optimizer": self.optimizer_s()})

    # -- forward and backward ----------------------------------------------------------------------

    @cached_property
    def _recomputed(self) -> float:
        """Share of forward that backward repeats."""
        setup = self.setup
        if setup.checkpointing == "none":
            return 0.0
        return 1.0 / setup.every if setup.checkpointing == "full" else 0.3 / setup.every

    @property
    def _passes(self) -> float:
        """Products of the size of forward: forward, recomputation, gradient of inputs, gradient of weights."""
        return 2.0 + self._recomputed + (0.0 if self.setup.lora_rank else 1.0)

    def _layer_parts(
        self, work: LayerWork, full: LayerWork, tokens: float, lengths: Sequence[float]
    ) -> dict[str, float]:
        own = tokens / self.setup.tensor_parallel
        constants, operations = self.constants, self.operations
        forwards = 1 + self._recomputed
        attention = self._attention_s(work, lengths)
        unfused = 1.0 if self.setup.is_compiled else EAGER_SMALL_KERNELS
        bandwidth = self.gpu.hbm_bytes_per_s * ELEMENTWISE_SHARE
        moved = full.elementwise_bytes(own) / bandwidth
        # each pass rounds two of inputs, weights and outputs
        rounded = self._passes * 2 / 3 * FP8_BYTES * work.rounded_elements(tokens, own) / bandwidth
        return {
            "matmuls": self._passes * work.matmul_s(operations, tokens),
            "attention": self._kernel_time
            * attention
            * (self._attention_forwards + ATTENTION_BACKWARD_FLOPS * constants.attention_backward),
            "experts": constants.experts * self._passes * full.experts_s(operations, own),
            # backward reads and writes about twice the bytes of forward
            "small_kernels": constants.small_kernels * unfused * moved * (forwards + 2) + rounded,
            "adapters": self._adapter_s(work.layer, own),
            "host": constants.layer_s * (forwards + 1),
        }

    @property
    def _kernel_time(self) -> float:
        """Time of attention relative to the kernels of the curves."""
        kernel = self.constants.attention_kernel
        if kernel == "flash_attention_3":
            return 1.0
        own = ATTENTION_TIME.get(self.gpu.architecture, 1.0)
        return own * (EAGER_ATTENTION_TIME if kernel == "eager" else 1.0)

    @property
    def _attention_forwards(self) -> float:
        """Selective checkpointing of norms and activations keeps the output of attention."""
        is_kept = (
            self.setup.checkpointing == "selective" and "attention" not in self.setup.checkpointed_modules
        )
        return 1.0 if is_kept else 1 + self._recomputed

    def _attention_s(self, work: LayerWork, lengths: Sequence[float]) -> float:
        """Return the forward time of attention of a row: one call for all samples, split by context parallelism."""
        attention = work.layer.attention
        setup, total = self.setup, 0.0
        if work.layer.state is not None:
            tokens = sum(lengths) / setup.context_parallel
            # chunked kernels move states once per 64 tokens
            total += tokens / 64 * 2 * work.state_bytes() / (self.gpu.hbm_bytes_per_s * STATE_SHARE)
        if attention is None:
            return total
        heads = -(-attention.heads // setup.tensor_parallel)
        for length in lengths:
            pairs = visible_pairs([length], attention.index_topk or attention.window)
            flops = pairs * pair_flops(attention, setup.tensor_parallel) / setup.context_parallel
            total += self.operations.context_attention(length, heads * max(1, len(lengths)), flops)
        return total

    def _adapter_s(self, layer: Layer, tokens: float) -> float:
        """Return the time of adapters: small products that read inputs, and read and write outputs."""
        rank = self.setup.lora_rank
        if not rank:
            return 0.0
        adapted = [matrix for matrix in layer.matrices if matrix.is_adapted(self.setup.lora_targets)]
        moved = sum(2 * tokens * matrix.active * (matrix.ins + 3 * matrix.outs) for matrix in adapted)
        return moved * (3 + self._recomputed) / (self.gpu.hbm_bytes_per_s * ELEMENTWISE_SHARE)

    def _head_s(self, tokens: float) -> float:
        """Return head and loss: products of forward and backward, and passes over float32 logits."""
        setup = self.setup
        passes = 2.0 + (0.0 if setup.lora_rank else 1.0) + (1.0 if setup.loss == "rl" else 0.0)
        vocab = -(-self.shape.vocab // setup.tensor_parallel)
        if self.constants.head_dtype == "bfloat16":
            product = self.operations.gemm(tokens, self.shape.hidden, vocab)
        else:
            flops = 2 * tokens * self.shape.hidden * vocab
            product = flops / (self.gpu.peak_flops[self.constants.head_dtype] * FLOAT32_SHARE)
        logits = 4.0 * tokens * vocab * LOGITS_PASSES / (self.gpu.hbm_bytes_per_s * ELEMENTWISE_SHARE)
        return passes * product + logits

    # -- communication -----------------------------------------------------------------------------

    def _exposed_s(self, busy: float, computed: float) -> float:
        """Return what the computation of a micro-batch does not hide of collectives that take ``busy`` seconds."""
        return max(busy * self.constants.exposed, busy - computed)

    def gathers_s(self) -> float:
        """Return FSDP's gathers of weights for one micro-batch: in forward, and again in backward if they are freed."""
        setup = self.setup
        gathers = 1 if setup.reshard_after_forward is False else 2
        return gathers * sum(
            self.links.collective("all_gather", size * DTYPE_BYTES[setup.param_dtype], group)
            for size, group in self._sharded
        )

    def reductions_s(self) -> float:
        """Return FSDP's reductions of gradients for one step: scattered over shards, summed over replicas."""
        setup, total = self.setup, 0.0
        for size, group in self._sharded:
            reduced = self._trained_share * size * DTYPE_BYTES[setup.reduce_dtype]
            total += self.links.collective("reduce_scatter", reduced, group)
            if setup.replicate > 1:
                nodes = max(2, setup.ranks // setup.ranks_per_node)
                total += self.links.between("all_reduce", reduced / group, 1, nodes)
        return total

    @property
    def _sharded(self) -> list[tuple[float, int]]:
        """Weights that a group of FSDP shards, and its ranks: experts of this rank's expert group, and all others."""
        setup = self.setup
        experts = max(1, setup.shard * setup.tensor_parallel // setup.expert_parallel)
        return [
            (self._sharded_weights(experts=False), setup.shard),
            (self._sharded_weights(experts=True), experts),
        ]

    @property
    def _trained_share(self) -> float:
        """Share of the weights that has gradients."""
        rank = self.setup.lora_rank
        if not rank:
            return 1.0
        return self.shape.adapter_parameters(rank, self.setup.lora_targets) / self.shape.text_total

    def _sharded_weights(self, *, experts: bool) -> float:
        """Return the parameters that one FSDP group holds: experts of this rank's expert group, or all others."""
        routed = sum(number * layer.expert_parameters for layer, number in self.shape.groups)
        setup = self.setup
        return (
            routed / setup.expert_parallel
            if experts
            else (self.shape.text_total - routed) / setup.tensor_parallel
        )

    def _inside_layers_s(self, tokens: float) -> float:
        """Return collectives that computation waits for: experts, context and tensor parallelism, forward and back."""
        setup, hidden = self.setup, self.shape.hidden
        passes, total = 2 + self._recomputed, 0.0
        for work, _, number in self._layers:
            attention = work.layer.attention
            if setup.expert_parallel > 1 and work.experts is not None:
                size = 2.0 * tokens / setup.tensor_parallel * work.experts[1] * hidden
                total += number * passes * 2 * self.links.collective("alltoall", size, setup.expert_parallel)
            if setup.context_parallel > 1 and attention is not None:
                width = attention.heads * attention.qk_dim * 2 + attention.kv_elements
                size = 2.0 * tokens * width / setup.tensor_parallel
                total += number * passes * self.links.collective("alltoall", size, setup.context_parallel)
            if setup.tensor_parallel > 1:
                size = 2.0 * tokens * hidden
                total += number * passes * 2 * self.links.all_reduce(size, setup.tensor_parallel)
        return total

    # -- optimizer ---------------------------------------------------------------------------------

    def optimizer_s(self) -> float:
        """Return the update: a read of weight, gradient and states and a write of weight and states, in float32."""
        setup, gpu = self.setup, self.gpu
        shards = max(1, setup.shard * setup.tensor_parallel)
        own = self._trained_share * self.shape.text_total / shards
        states = STATES_PER_WEIGHT[setup.optimizer]
        moved = own * 4 * (3 + 2 * states)
        copied = gpu.pcie_bytes_per_s * PCIE_SHARE
        if setup.cpu_offload:
            # gradients to the host and weights back; the update reads and writes the host's memory
            return own * 8 / copied + moved / HOST_BYTES_PER_S
        total = moved / (gpu.hbm_bytes_per_s * ELEMENTWISE_SHARE)
        if setup.optimizer_offload:
            total += 2 * own * 4 * states / copied  # states to the GPU and back
        if setup.optimizer == "muon":
            total += self._newton_schulz_s() / shards
        return total + own * 4 / (gpu.hbm_bytes_per_s * ELEMENTWISE_SHARE)  # the norm of the gradients

    def _newton_schulz_s(self) -> float:
        """Return Muon's five iterations for all matrices: per iteration 2·(2·s²·l) + 2·s³ FLOP for an s × l matrix."""
        flops = 0.0
        for layer, number in self.shape.groups:
            for matrix in layer.matrices:
                short, long = sorted((matrix.ins, matrix.outs))
                flops += number * matrix.copies * 5 * (4 * short**2 * long + 2 * short**3)
        return flops / (self.gpu.peak_flops["bfloat16"] * MUON_SHARE)

    def _figure(self, name: str, parts: Mapping[str, float]) -> Figure:
        setup = self.setup
        inputs = {"seq_len": setup.seq_len, "micro_batches": setup.micro_batches, "ranks": setup.ranks}
        figures = [
            Figure(
                f"{name}.{part}",
                value,
                value,
                value,
                "s",
                "sum over layers",
                inputs,
                SOURCE,
                self.gpu.curve_tier,
            )
            for part, value in parts.items()
        ]
        total = add(f"{name}.operations", "s", figures, source=SOURCE)
        factor = self.constants.factor * self.gpu.curve_factor
        factor *= 1.0 if self.gpu.architecture == "hopper" else OUTSIDE_FIT
        correction = Figure(
            "time.trainer.correction",
            1.0,
            1 / factor,
            factor,
            "1",
            "error outside the fit",
            {},
            SOURCE,
            Tier.TABLE,
        )
        return multiply(name, "s", [total, correction], source=SOURCE)


STATES_PER_WEIGHT = {"adamw": 2, "muon": 1, "sgd": 1, "sign_sgd": 0}
"""Tensors that an optimizer keeps for each weight, in float32."""
FLOAT32_SHARE = 0.8
"""Share of the float32 peak of the head's product. Judgment: cuBLAS reaches 0.8-0.9 with large matrices."""
LOGITS_PASSES = 8.0
"""Reads and writes of float32 logits in the loss and its gradient: softmax, log-sum-exp, entropy, gradient, each once
in and once out."""
PCIE_SHARE = 0.8
"""Share of the rate of PCIe that copies from pinned memory reach."""
HOST_BYTES_PER_S = 2.5e10
"""Host memory bandwidth for each rank's optimizer on the CPU. Judgment: 200 GB/s a node for 8 ranks."""
MUON_SHARE = 0.4
"""Share of the peak of Newton-Schulz iterations. Judgment: products of sharded matrices are small."""
