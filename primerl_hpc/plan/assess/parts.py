"""The predicted parts of a plan, each computed once: memory and times of trainer and engines for a case.

Layouts that differ on one side share the figures of the other side, which makes a search over hundreds of layouts fast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

from primerl_hpc.plan.assess.case import Case
from primerl_hpc.plan.assess.choice import LayoutChoice, PrefillChoice
from primerl_hpc.plan.predict.figure import Figure, add, exact, multiply
from primerl_hpc.plan.predict.layouts import TrainerSetup
from primerl_hpc.plan.predict.ledger import correct
from primerl_hpc.plan.predict.memory_engine import EngineMemory, SequenceBytes, engine_memory
from primerl_hpc.plan.predict.memory_trainer import TrainerMemory, trainer_memory
from primerl_hpc.plan.predict.timing.time_engine import EngineTimes
from primerl_hpc.plan.predict.timing.time_trainer import TrainerTimes
from primerl_hpc.plan.predict.timing.time_transfer import (
    StorageRates,
    broadcast_update,
    checkpoint,
    checkpoint_bytes,
    delta_update,
    filesystem_update,
    weight_bytes_of,
)

DETECT_S = 0.1
"""The orchestrator looks for a new version every 0.2 s (`orchestrator.engines.weight_watcher.POLL_S`)."""
DELIVER_S = 0.2
"""Packing and sending of a batch; it overlaps with the collection of the next one."""

DELTA_SHARE = 0.02
"""Share of bytes in a difference with ``weights.transport: delta``: 0.01 to 0.03 at usual learning rates."""

STEP, RESERVED = "time.trainer.step", "memory.trainer.reserved"
"""Figures whose corrections apply to several parts."""

Value = TypeVar("Value")


class Parts:
    def __init__(self, case: Case) -> None:
        self.case = case
        self._known: dict[Any, Any] = {}

    def _once(self, key: tuple[Any, ...], compute: Callable[[], Value]) -> Value:
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    def _correct(self, figure: Figure, name: str = "") -> Figure:
        """Return the figure with the correction of the ledger for ``name`` (default: its own)."""
        return correct(figure, self.case.corrections.get(name or figure.name))

    def _factor(self, name: str) -> float:
        found = self.case.corrections.get(name)
        return 1.0 if found is None else found.factor

    # -- engines -----------------------------------------------------------------------------------
    def engine_times(self, choice: LayoutChoice | PrefillChoice) -> EngineTimes:
        """Return the times of one of the policy's engines; with a `PrefillChoice`, of a prefill engine."""
        setup, case = self.case.engine_setup(choice), self.case
        is_prefill = isinstance(choice, PrefillChoice)
        gpu = case.gpu_of_prefill if is_prefill else case.engine_gpu
        node = case.node_of_prefill if is_prefill else case.engine_node
        return self._once(("times", gpu.name, setup), lambda: EngineTimes(case.shape, gpu, setup, node.gpus))

    @cached_property
    def context(self) -> float:
        """Mean tokens of a running sequence: its prompt and what it has generated so far."""
        return self.case.prompt.value + self.case.distribution.mean_position

    def max_running(self, choice: LayoutChoice) -> int:
        """Return the number of sequences that an engine runs at the same time: by its KV cache and vLLM's limit."""
        return max(1, int(self.kv_concurrency(choice).value))

    def _engine_memory(self, choice: LayoutChoice | PrefillChoice) -> EngineMemory:
        setup, case = self.case.engine_setup(choice), self.case
        gpu = case.gpu_of_prefill if isinstance(choice, PrefillChoice) else case.engine_gpu
        key = ("engine memory", gpu.name, setup)
        return self._once(key, lambda: engine_memory(case.shape, setup, gpu.memory_bytes))

    def sequence_bytes(self, choice: LayoutChoice) -> SequenceBytes:
        """Return what a sequence occupies in the KV cache of a GPU."""
        return self._engine_memory(choice).sequence_bytes

    def kv_tokens(self, choice: LayoutChoice | PrefillChoice) -> Figure:
        """Return the tokens that the KV caches of an engine hold, all data-parallel ranks together."""
        tokens = self._engine_memory(choice).kv_tokens
        ranks = exact("engine.data_parallel", float(choice.data_parallel), "1", "data_parallel")
        return multiply("kv.tokens", "tokens", [tokens, ranks])

    def kv_concurrency(self, choice: LayoutChoice) -> Figure:
        """Return the sequences of the mean context that an engine runs at the same time."""
        memory = self._engine_memory(choice)
        return memory.concurrency(max(1, int(self.context))).renamed("kv.concurrency")

    def engine_memory(self, choice: LayoutChoice | PrefillChoice) -> Figure:
        """Return what an engine needs of a GPU at least: all but the KV cache, and one longest sequence in it."""
        memory = self._engine_memory(choice)
        used = memory.kv.find("memory.engine.without_kv")
        assert used is not None  # the KV cache is what it leaves
        sequence = exact(
            "memory.engine.sequence",
            memory.sequence_bytes.of(memory.max_model_len),
            "B",
            "KV cache of one sequence of max_model_len",
            {"max_model_len": memory.max_model_len},
        )
        return add("memory.engine", "B", [used, sequence])

    def asleep(self, choice: LayoutChoice) -> Figure:
        """Return what a sleeping engine keeps of a GPU."""
        memory = self._engine_memory(choice)
        return add("memory.engine.asleep", "B", [memory.context, memory.graphs])

    def running(self, choice: LayoutChoice) -> float:
        """Return the sequences that an engine runs in the steady state, as far as permits and demand allow."""
        rollouts = self.case.recipe.rollouts
        demand = self.case.batch_size * (2 + rollouts.max_age)
        permits = choice.max_in_flight or demand
        return max(1.0, min(self.max_running(choice), min(permits, demand) / choice.num_engines))

    def decode(self, choice: LayoutChoice) -> Figure:
        """Return the time between two tokens of a sequence in the steady state."""
        times, batch = self.engine_times(choice), self.running(choice) / choice.data_parallel
        key = ("decode", times.setup, round(batch, 3))
        name = "time.engine.decode"
        return self._once(key, lambda: self._correct(times.decode_step(batch, self.context, name=name)))

    def decode_curve(self, choice: LayoutChoice) -> tuple[tuple[float, float], ...]:
        """Return (running sequences, seconds per token) for the simulation."""
        times, most = self.engine_times(choice), self.max_running(choice)
        return self._once(("curve", times.setup, most), lambda: self._curve(times, most))

    def _curve(self, times: EngineTimes, most: int) -> tuple[tuple[float, float], ...]:
        points = [float(2**power) for power in range(most.bit_length()) if 2**power < most] + [float(most)]
        data, factor = times.setup.data_parallel, self._factor("time.engine.decode")
        return tuple(
            (point, factor * times.decode_s(max(1.0, point / data), self.context)) for point in points
        )

    def prefill_s(self, choice: LayoutChoice) -> float:
        """Return the time for which the first prompt of a group occupies an engine."""
        times, prompt = self.engine_times(choice), self.case.prompt.value
        key = ("prefill", times.setup)
        return self._once(key, lambda: times.prefill_s(prompt, prompt) / times.setup.data_parallel)

    # -- trainer -----------------------------------------------------------------------------------
    def _trainer_memory(self, choice: LayoutChoice) -> TrainerMemory:
        setup = self.case.trainer_setup(choice)
        return self._once(("memory", setup), lambda: trainer_memory(self.case.shape, setup))

    def trainer_memory(self, choice: LayoutChoice) -> Figure:
        return self._correct(self._trainer_memory(choice).needed, RESERVED)

    def trainer_reserved(self, choice: LayoutChoice) -> Figure:
        """Return the peak that torch's allocator reserves, which the trainer reports as ``perf/peak_memory``."""
        return self._correct(self._trainer_memory(choice).reserved, RESERVED)

    def host_memory(self, choice: LayoutChoice) -> Figure:
        """Return the host memory of a node for offloaded tensors and copies that are saved in the background."""
        return self._trainer_memory(choice).host

    def trainer_times(self, choice: LayoutChoice) -> TrainerTimes:
        setup, case = self.case.trainer_setup(choice), self.case
        return self._once(("trainer", setup), lambda: TrainerTimes(case.shape, case.trainer_gpu, setup))

    def _row(self, setup: TrainerSetup) -> list[float]:
        """Return the tokens of the samples of one forward: of equal length, long ones weighted by their tokens."""
        rows = setup.micro_batches * setup.micro_rows * setup.data_parallel
        tokens = max(1.0, min(float(setup.seq_len), self.case.batch_tokens / rows))
        sample = self.case.sample_tokens
        number = max(1, round(tokens / min(sample, tokens)))
        return [tokens / number] * number * setup.micro_rows

    def trainer_step(self, choice: LayoutChoice) -> Figure:
        times = self.trainer_times(choice)
        return self._once(
            ("step", times.setup), lambda: self._correct(times.step(self._row(times.setup)), STEP)
        )

    def trainer_step_s(self, choice: LayoutChoice) -> float:
        times = self.trainer_times(choice)
        return self._once(
            ("step s", times.setup), lambda: self._factor(STEP) * times.step_s(self._row(times.setup))
        )

    def trainer_fixed_s(self, choice: LayoutChoice) -> float:
        """Return the part of a step that does not depend on the number of tokens."""
        times = self.trainer_times(choice)
        return self._once(("fixed", times.setup), lambda: self._factor(STEP) * times.optimizer_s())

    # -- transfers ---------------------------------------------------------------------------------
    def weight_update(self, choice: LayoutChoice) -> Figure:
        """Return the time for which engines are paused for a version: they read and load it, or receive it."""
        update = self._update(choice)
        return self._correct(update if self._is_broadcast else self._loading(update), "time.weight_update")

    def publish(self, choice: LayoutChoice) -> Figure | None:
        """Return the time in which the trainer writes a version; None with transport ``broadcast``."""
        update = self._update(choice)
        return None if self._is_broadcast else update.find(f"{update.name}.write")

    def publish_s(self, choice: LayoutChoice) -> float:
        figure = self.publish(choice)
        return 0.0 if figure is None else figure.value

    @property
    def _is_broadcast(self) -> bool:
        return self.case.recipe.weights.transport == "broadcast"

    def _update(self, choice: LayoutChoice) -> Figure:
        case = self.case
        setup = case.trainer_setup(choice)
        key = ("update", choice.trainer_ranks, choice.engine_nodes + choice.prefill_nodes)
        return self._once(key, lambda: self._transfer(setup, choice))

    def _transfer(self, setup: TrainerSetup, choice: LayoutChoice) -> Figure:
        case, rates = self.case, StorageRates()
        size = weight_bytes_of(case.shape, setup, case.recipe.model.dtype)
        transport, gpu = case.recipe.weights.transport, case.engine_gpu
        if transport == "broadcast":
            return broadcast_update(size, gpu)
        if transport == "delta":
            return delta_update(size, DELTA_SHARE, choice.trainer_ranks, rates)
        nodes = max(1, choice.engine_nodes + choice.prefill_nodes)
        return filesystem_update(size, choice.trainer_ranks, nodes, gpu, rates)

    def _loading(self, update: Figure) -> Figure:
        """Return what remains of an update after the write: reading and loading, during which engines are paused."""
        rest = [
            figure
            for figure in update.inputs.values()
            if isinstance(figure, Figure) and not figure.name.endswith(".write")
        ]
        return add("time.weight_update", "s", rest)

    def checkpoint_size(self, choice: LayoutChoice) -> Figure:
        return checkpoint_bytes(self.case.shape, self.case.trainer_setup(choice))

    def checkpoint_write(self, choice: LayoutChoice) -> Figure:
        return checkpoint(self.case.shape, self.case.trainer_setup(choice), StorageRates())
