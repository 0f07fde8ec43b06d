"""Benchmark mode: its requests, and the recipes that the regular roles run on synthetic data.

request = BenchRequest(lengths="512-4096", steps=8)  # the trainer
recipe = for_bench(recipe, request)
request.draw(3, seed=0)                              # [3970, 2089, 3616]

for_load(recipe), with_load(plan)                    # engines under a `LoadRequest`
for_loop(recipe, LoopRequest(...))                   # the orchestrator, or the complete loop
"""

from __future__ import annotations

import random
import re

from pydantic import field_validator

from primerl_hpc.common.block import Block, Bool, NonNegativeInt, PositiveFloat, PositiveInt
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import MAIN_PHASE, Kind, Role, process_name
from primerl_hpc.plan.plan import OnExit, Plan
from primerl_hpc.recipe.schema.evaluation import EvaluationSettings
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.rollout import Environments, TrainEnvironment
from primerl_hpc.recipe.schema.run import Recovery, Tracking
from primerl_hpc.recipe.schema.sft import SFTData

TOKEN_IDS = range(4, 100)
"""Synthetic tokens: ids that exist in every vocabulary."""


class BenchRequest(Block):
    lengths: str
    """Tokens per sample: ``2048`` (all samples), ``512-4096`` (uniform) or ``512,512,4096`` (in turn)."""
    warmup: NonNegativeInt = 2
    """Number of warm-up steps that are not measured."""
    steps: PositiveInt = 8
    save_every: PositiveInt | None = None
    """Steps between checkpoints; null: no checkpoints."""
    trace: str | None = None
    """Folder for the trace of an additional step that is not measured."""
    peak_tflops: PositiveFloat | None = None
    """Peak TFLOP/s of one device; null: derived from its model."""

    @field_validator("lengths")
    @classmethod
    def _lengths_have_a_valid_form(cls, text: str) -> str:
        return _check_lengths(text, at_least=2)

    @property
    def num_steps(self) -> int:
        return self.warmup + self.steps + (self.trace is not None)

    @property
    def longest(self) -> int:
        return longest_of(self.lengths)

    def draw(self, count: int, *, seed: int) -> list[int]:
        """Return the number of tokens of ``count`` samples."""
        return draw_lengths(self.lengths, count, seed=seed)


class LoadRequest(Block):
    """Load levels of a benchmark of engines: first those of ``concurrency`` (closed loop), then those of ``rates``
    (open loop)."""

    prompt_tokens: str
    """Tokens per prompt, in the form of `BenchRequest.lengths`."""
    output_tokens: str
    concurrency: tuple[PositiveInt, ...] = ()
    """Requests in flight: a new one starts when one ends."""
    rates: tuple[PositiveFloat, ...] = ()
    """Requests per second, which arrive at random times (Poisson process) whether earlier ones have ended or not."""
    requests: PositiveInt | None = None
    """Requests of each level; null: four times the concurrency, or 20 s of the rate, and at least 16."""
    seed: NonNegativeInt = 0

    @field_validator("prompt_tokens", "output_tokens")
    @classmethod
    def _lengths_have_a_valid_form(cls, text: str) -> str:
        return _check_lengths(text, at_least=1)

    def num_requests(self, level: float, *, is_open: bool) -> int:
        """Return the number of requests of a level."""
        return self.requests or max(16, round(20 * level if is_open else 4 * level))


class LoopRequest(Block):
    """A benchmark of the orchestrator, or of the complete loop."""

    has_trainer: Bool
    """False: the orchestrator does not wait for policy versions."""
    is_synthetic: Bool
    """True: rollouts of given lengths and random rewards instead of the recipe's environments."""
    prompt_tokens: PositiveInt | None = None
    """About this many tokens per prompt of a synthetic rollout; null: what the recipe expects."""
    output_tokens: PositiveInt | None = None
    """Sampled tokens of a synthetic rollout; null: ``rollouts.sampling.max_tokens``."""
    warmup: NonNegativeInt = 2
    """Number of steps that are not measured."""
    steps: PositiveInt = 8

    @property
    def num_steps(self) -> int:
        return self.warmup + self.steps


def longest_of(lengths: str) -> int:
    """Return the largest number of tokens of ``512-4096`` and the like."""
    return max(int(word) for word in re.findall(r"\d+", lengths))


def draw_lengths(lengths: str, count: int, *, seed: int) -> list[int]:
    """Return ``count`` numbers of tokens."""
    values = [int(word) for word in re.findall(r"\d+", lengths)]
    if "-" in lengths:
        generator = random.Random(seed)
        return [generator.randint(*values) for _ in range(count)]
    return [values[index % len(values)] for index in range(count)]


def _check_lengths(text: str, *, at_least: int) -> str:
    values = [int(word) for word in re.findall(r"\d+", text)]
    is_range = re.fullmatch(r"\d+-\d+", text) and values[0] <= values[1]
    if not (is_range or re.fullmatch(r"\d+(,\d+)*", text)) or min(values) < at_least:
        raise ValueError(
            f"'{text}' must have the form 2048 (all samples), 512-4096 (uniform) or 512,512,4096 (in turn), "
            f"with at least {at_least} {'token' if at_least == 1 else 'tokens'}"
        )
    return text


def for_bench(recipe: Recipe, request: BenchRequest) -> Recipe:
    """Return a recipe of kind rl or sft reduced to training steps on synthetic data, with the requested checkpoints.

    Raises ConfigError if a sample does not fit into a row.
    """
    if request.longest > recipe.seq_len:
        raise ConfigError(
            f"samples of up to {request.longest} tokens do not fit into rows of seq_len {recipe.seq_len}",
            hint="raise seq_len of the recipe, or reduce --lengths",
        )
    changes = _short(recipe, request.num_steps, save_every=request.save_every)
    if recipe.sft is not None:
        changes["sft"] = recipe.sft.model_copy(update={"data": SFTData(path="synthetic"), "validation": None})
    return recipe.model_copy(update=changes)


def _short(recipe: Recipe, num_steps: int, *, save_every: int | None = None) -> dict[str, object]:
    """Return the changes that leave only ``num_steps`` steps of training."""
    saves = {
        "interval": save_every,
        "keep_last": 1,
        "keep_interval": None,
        "at_end": False,
        "fork": None,
    }
    return {
        "max_steps": num_steps,
        "checkpoint": recipe.checkpoint.model_copy(update=saves),
        "warmup": None,
        "after": None,
        "evaluation": None,
        "stop_when": None,
        "weights": recipe.weights.model_copy(update={"keep_best": None}),
        "recovery": Recovery(in_place=False),
        "tracking": Tracking(),
    }


# -- engines, and the loop ---------------------------------------------------------------------------


def for_load(recipe: Recipe) -> Recipe:
    """Return the engines of a recipe as one of kind inference. Raises ConfigError if the recipe has none."""
    if not recipe.has_engines or recipe.is_external:
        raise ConfigError(
            f"this recipe of kind {recipe.kind} starts no engines",
            hint="use a recipe of kind rl, eval or inference; for kind sft: primerl-hpc bench sft",
        )
    served = recipe.for_evaluation(EvaluationSettings(), model_path=recipe.model.name)
    changes = {
        "kind": Kind.INFERENCE,
        "name": recipe.name,
        "environments": Environments(),
        "evaluation": None,
        "judge": None,
        "teacher": None,
        "lora": None,
        "layout": served.layout.model_copy(update={"colocated": None, "auto_split": False}),
    }
    return served.model_copy(update=changes)


def with_load(plan: Plan) -> Plan:
    """Return a plan of kind inference with a process that measures its engines and ends the run.

    The process runs on the node of the router, with the role of an evaluator and the router's interpreter.
    """
    phase, name = plan.phase(MAIN_PHASE), process_name(Role.EVALUATOR, 0)
    router = phase.process(process_name(Role.ROUTER, 0))
    # the last four arguments follow its interpreter, which may be in a container: module, run directory, phase, name
    changes = {
        "name": name,
        "role": Role.EVALUATOR,
        "argv": (*router.argv[:-4], "primerl_hpc.roles.load", plan.run_dir, phase.name, name),
        "on_exit": OnExit.ENDS_PHASE,
        "ready_timeout_s": 0,
        "log": "load.log",
    }
    changed = phase.model_copy(update={"processes": (*phase.processes, router.model_copy(update=changes))})
    return plan.model_copy(update={"phases": (changed,)})


def for_loop(recipe: Recipe, request: LoopRequest) -> Recipe:
    """Return a recipe of kind rl reduced to a few steps without checkpoints and evaluations.

    Raises ConfigError for another kind, and if synthetic rollouts do not fit into the context.
    """
    if recipe.kind != Kind.RL:
        raise ConfigError(
            f"a recipe of kind {recipe.kind} has no orchestrator", hint="use a recipe of kind rl"
        )
    environments, rollouts = recipe.environments.model_copy(update={"eval": ()}), recipe.rollouts
    if request.is_synthetic:
        prompt, output = _lengths_of(recipe, request)
        synthetic = TrainEnvironment(
            id="synthetic-rollouts", args={"prompt_words": max(1, prompt // 2), "seed": recipe.seed}
        )
        environments = Environments(train=(synthetic,))
        extra = {**rollouts.sampling.extra, "ignore_eos": True}
        sampling = rollouts.sampling.model_copy(update={"max_tokens": output, "extra": extra})
        rollouts = rollouts.model_copy(update={"sampling": sampling, "filters": (), "zero_advantage": "keep"})
    layout = recipe.layout
    if not request.has_trainer:
        ahead = {"max_off_policy_steps": request.num_steps, "async_level": request.num_steps}
        rollouts = rollouts.model_copy(update=ahead)
        layout = layout.model_copy(update={"colocated": None, "auto_split": False})
    inference = layout.inference.model_copy(update={"elastic": False, "partition": None})
    changes: dict[str, object] = {
        "environments": environments,
        "rollouts": rollouts,
        "layout": layout.model_copy(update={"inference": inference}),
    }
    return recipe.model_copy(update=_short(recipe, request.num_steps) | changes)


def _lengths_of(recipe: Recipe, request: LoopRequest) -> tuple[int, int]:
    """Return the tokens of a synthetic prompt and its reply. Raises ConfigError if they exceed the context."""
    limit, expected = min(recipe.max_model_len, recipe.seq_len), recipe.rollouts.expected
    output = request.output_tokens or recipe.rollouts.sampling.max_tokens or limit // 2
    prompt = request.prompt_tokens or expected.prompt_tokens or min(1024, max(1, (limit - output) // 2))
    if prompt + output > limit:
        raise ConfigError(
            f"{prompt} prompt tokens and {output} output tokens do not fit into {limit} tokens (seq_len, "
            "inference.max_model_len)",
            hint="reduce --prompt-tokens or --output-tokens, or raise both keys",
        )
    return prompt, output


def with_idle_trainer(plan: Plan) -> Plan:
    """Return the plan with a trainer that only waits. It stays in the plan because batches are packed for its ranks."""
    phase = plan.phase(MAIN_PHASE)
    processes = tuple(
        # the last five arguments follow its interpreter: -m, module, run directory, phase, name
        process.model_copy(update={"argv": (*process.argv[:-5], "-c", "import signal; signal.pause()")})
        if process.role == Role.TRAINER
        else process
        for process in phase.processes
    )
    return plan.model_copy(update={"phases": (phase.model_copy(update={"processes": processes}),)})
