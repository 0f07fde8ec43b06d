"""The root block of a recipe: *what* to train.

`Recipe` mirrors the YAML file from top to bottom; each of its blocks is in a module of this folder. A value that
several roles need is one key, which all of them read. Derived values are properties.

Pydantic validates each block by itself. Rules that involve several blocks are in `cross_checks`;
`recipe.load.validate_recipe` and `recipe.load.parse_recipe` apply both.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from primerl_hpc.common.block import (
    Block,
    NonNegativeInt,
    PositiveInt,
    Variables,
)
from primerl_hpc.common.names import Kind, Role, is_valid_name
from primerl_hpc.recipe.schema.after import After
from primerl_hpc.recipe.schema.algorithm import GRPO, Algorithm
from primerl_hpc.recipe.schema.evaluation import EvaluationSettings
from primerl_hpc.recipe.schema.layout import FrozenLayout, InferenceLayout, Layout
from primerl_hpc.recipe.schema.model import FrozenModel, Inference, Judge, Model, Teacher
from primerl_hpc.recipe.schema.rollout import Environments, EvalEnvironment, Rollouts
from primerl_hpc.recipe.schema.run import Checkpoint, Log, Recovery, StopWhen, Timeouts, Tracking
from primerl_hpc.recipe.schema.sft import SFT
from primerl_hpc.recipe.schema.training import (
    AdamW,
    Constant,
    DPPOLoss,
    LoRA,
    Loss,
    Optimizer,
    Scheduler,
    TrainerConfig,
    Warmup,
    Weights,
)


class Recipe(Block):
    """Everything about *what* to train. The cluster profile describes *where*."""

    kind: Kind
    """Kind of the run.
    ``rl``: train by reinforcement learning.
    ``sft``: train on demonstrations (supervised fine-tuning).
    ``eval``: evaluate policies on environments.
    ``inference``: serve the model."""
    name: str
    """Name of the run, used for the job, the run directory and tracking: 1 to 100 letters, digits, '.', '_' or '-'."""
    model: Model
    """The model that is trained, evaluated or served."""
    seq_len: PositiveInt = 2048
    """Tokens of one packed row, which is also the maximum length of a training sample."""
    max_steps: PositiveInt | None = None
    """Number of trainer steps. Required by kinds rl and sft."""
    stop_when: StopWhen | None = None
    """kinds rl and sft: end the run before ``max_steps``, saved and done, when a metric reaches a value. Default
    (null): train ``max_steps`` steps."""
    seed: NonNegativeInt = 42
    """Random seed for the order of tasks and data, the initialization of adapters, and the engines."""
    layout: Layout = Layout()
    """How many nodes and accelerators each role uses."""
    environments: Environments = Environments()
    """The environments that provide tasks and rewards."""
    rollouts: Rollouts = Rollouts()
    """How many rollouts are generated, how they are sampled, and which are trained on."""
    algorithm: Algorithm = GRPO()
    """How rewards become advantages. An environment may override it with its own ``algorithm``."""
    teacher: Teacher | None = None
    """Teacher model for algorithms ``opd`` and ``sft_distill``. Default (null): no teacher."""
    judge: Judge | None = None
    """kinds rl and eval: model used by environment judges that name no server of their own. Default (null): no
    judge."""
    loss: Loss = DPPOLoss()
    """kind rl: the policy loss, a function of advantages and log-probabilities."""
    optimizer: Optimizer = AdamW()
    """Optimizer and its hyperparameters."""
    scheduler: Scheduler = Constant()
    """Learning rate schedule over the steps."""
    lora: LoRA | None = None
    """kinds rl and sft: train low-rank adapters instead of the model's weights. kind eval detects adapters in
    ``evaluation.weights``. Default (null): train all weights."""
    trainer: TrainerConfig = TrainerConfig()
    inference: Inference = Inference()
    sft: SFT | None = None
    """Data and batching of supervised fine-tuning. Required by kind sft."""
    warmup: Warmup | None = None
    """kind rl: an SFT phase before RL, whose last weights become policy v0. Default (null): no warm-up."""
    checkpoint: Checkpoint = Checkpoint()
    """When checkpoints are saved, and how many are kept."""
    weights: Weights = Weights()
    """How policy versions are sent to the engines, and which are kept on disk."""
    evaluation: EvaluationSettings | None = None
    """kind eval: the policy versions or the external server to evaluate; null: only ``model``. kind sft: evaluate
    ``environments.eval`` while training; null: no evaluation and no engines."""
    after: After | None = None
    """kinds rl and sft: jobs that start when the run is done: an export, an evaluation. Default (null): none."""
    tracking: Tracking = Tracking()
    """Where metrics are sent in addition to the run directory."""
    log: Log = Log()
    timeouts: Timeouts = Timeouts()
    recovery: Recovery = Recovery()
    env: Variables = Field(default_factory=dict)
    """Environment variables for every role; they override those of the profile. PYTHONPATH is not overridden: its
    folders come before the profile's."""
    env_by_role: dict[Role, Variables] = Field(default_factory=dict)
    """Environment variables for single roles, for example ``{trainer: {NCCL_DEBUG: INFO}}``; they override ``env``. The
    roles ``teacher``, ``judge`` and ``prefill`` use the variables of ``inference`` unless they have an entry."""

    @field_validator("name")
    @classmethod
    def _name_is_a_file_name(cls, value: str) -> str:
        if not is_valid_name(value):
            raise ValueError(
                "must be 1 to 100 letters, digits, '.', '_' or '-', starting with a letter or digit"
            )
        return value

    @model_validator(mode="after")
    def _goals_belong_to_training(self) -> Self:
        if self.stop_when is not None and self.kind not in (Kind.RL, Kind.SFT):
            raise ValueError(f"stop_when belongs to kinds rl and sft, but the kind is {self.kind}; remove it")
        is_pruned = self.kind == Kind.RL or self.is_evaluated_online
        if self.weights.keep_best is not None and not is_pruned:
            raise ValueError(
                "weights.keep_best belongs to kind rl, and to kind sft with an evaluation: other runs delete no weights"
            )
        return self

    def env_of_role(self, role: Role) -> Variables:
        """Return the variables of ``env_by_role`` that apply to ``role``."""
        if role in (Role.PREFILL, Role.TEACHER, Role.JUDGE) and role not in self.env_by_role:
            role = Role.INFERENCE
        return self.env_by_role.get(role, {})

    @property
    def policy_name(self) -> str:
        """Name under which engines serve the policy: the model's, or the run's if it trains an adapter."""
        return self.name if self.lora is not None else self.model.name

    @property
    def engine_memory_share(self) -> float:
        """Part of a GPU's memory that an engine may use."""
        colocated = self.layout.colocated
        if colocated is not None and colocated.mode == "share":
            return colocated.engine_share
        return self.inference.gpu_memory_utilization

    @property
    def replays_routers(self) -> bool:
        """True if the trainer routes tokens to the experts that the engines chose."""
        return self.kind == Kind.RL and self.trainer.router_replay

    @property
    def has_dropout(self) -> bool:
        """True if blocks or adapters drop values, so that recomputation needs the same random numbers."""
        return self.keeps_dropout or (self.lora is not None and self.lora.dropout > 0)

    @property
    def keeps_dropout(self) -> bool:
        """True if the model trains with the dropout rates of its config."""
        return self.kind == Kind.SFT and self.sft is not None and self.sft.model_dropout

    @property
    def is_evaluated_online(self) -> bool:
        """True for a run of kind sft that evaluates its weights while it trains."""
        return self.kind == Kind.SFT and self.evaluation is not None

    @property
    def has_engines(self) -> bool:
        """True if the run needs engines that serve the policy; with `is_external` they run elsewhere."""
        return self.kind != Kind.SFT or self.is_evaluated_online

    @property
    def served_models(self) -> dict[Role, FrozenModel]:
        """Frozen models that the run serves itself, by the role of their engines."""
        models = {Role.TEACHER: self.teacher, Role.JUDGE: self.judge}
        is_used = {
            Role.TEACHER: self.kind == Kind.RL,
            Role.JUDGE: self.kind in (Kind.RL, Kind.EVAL) or self.is_evaluated_online,
        }
        return {
            role: model
            for role, model in models.items()
            if model is not None and model.base_url is None and is_used[role]
        }

    @property
    def engines_beside(self) -> dict[Role, FrozenLayout]:
        """Layouts of the engines that the run starts in addition to the policy's replicas, by role, in the order of
        their nodes."""
        frozen = {role: model.layout for role, model in self.served_models.items()}
        inference = self.layout.inference
        if inference.prefill is None or not self.has_engines:
            return frozen
        return {Role.PREFILL: inference.prefill.settled(inference), **frozen}

    @property
    def env_server_ready_s(self) -> int:
        """Seconds until an environment server must be ready; it first waits for the run's own judge."""
        judge_s = self.timeouts.inference_ready_s if Role.JUDGE in self.served_models else 0
        return self.timeouts.env_server_ready_s + judge_s

    @property
    def algorithms(self) -> list[Algorithm]:
        """The algorithm of each training environment."""
        return [environment.algorithm or self.algorithm for environment in self.environments.train]

    @property
    def algorithm_types(self) -> list[str]:
        return [algorithm.type for algorithm in self.algorithms]

    @property
    def max_model_len(self) -> int:
        return self.seq_len if self.inference.max_model_len == "auto" else self.inference.max_model_len

    @property
    def kept_versions(self) -> int:
        """Number of the newest policy versions that a run of kind rl keeps on disk."""
        return max(self.weights.keep_last, self.rollouts.max_lead + 1)

    @property
    def steps(self) -> int:
        """``max_steps`` of a kind that has steps."""
        assert self.max_steps is not None  # see `cross_checks.check_kind`
        return self.max_steps

    def for_warmup(self) -> Recipe:
        """Return the warm-up phase as an sft recipe with the same model and its own data, steps and optimizer.

        It trains all weights: policy v0 is a full model, on top of which the RL phase may train adapters.
        """
        assert self.warmup is not None
        return self.model_copy(
            update={
                "kind": Kind.SFT,
                "layout": self.layout.model_copy(update={"colocated": None}),  # a warm-up has no engines
                "max_steps": self.warmup.max_steps,
                "optimizer": self.warmup.optimizer,
                "scheduler": self.warmup.scheduler,
                "sft": self.warmup.sft,
                "checkpoint": self.warmup.checkpoint,
                "weights": Weights(keep_last=self.weights.keep_last),
                "trainer": self.trainer.model_copy(update={"router_replay": False}),
                "lora": None,
                "warmup": None,
                "stop_when": None,
                "teacher": None,
                "judge": None,
                "evaluation": None,
                "after": None,
            }
        )

    @property
    def is_external(self) -> bool:
        """True if the evaluated model is behind an external server."""
        return self.evaluation is not None and self.evaluation.external is not None

    def for_prefill(self) -> Recipe:
        """Return the recipe as prefill engines see it: the policy, with the layout of ``prefill``."""
        layout = self.layout.inference
        assert layout.prefill is not None
        shape = layout.prefill.settled(layout).model_dump(exclude={"replicas"})
        return self.model_copy(update={"layout": Layout(inference=layout.model_copy(update=shape))})

    def for_frozen(self, role: Role) -> Recipe:
        """Return the recipe as the engines of a teacher or judge see it: with that model instead of the policy."""
        frozen = self.served_models[role]
        inference = frozen.inference
        if inference.max_model_len == "auto":
            max_model_len = self.seq_len + 1 if role == Role.TEACHER else 2 * self.max_model_len
            inference = inference.model_copy(update={"max_model_len": max_model_len})
        layout = InferenceLayout.model_validate(frozen.layout.model_dump())
        return self.model_copy(
            update={
                "model": frozen.model,
                "inference": inference,
                "layout": Layout(inference=layout),
                "lora": None,
                "trainer": TrainerConfig(),
            }
        )

    def for_evaluation(
        self,
        evaluation: EvaluationSettings,
        *,
        model_path: str,
        environments: tuple[EvalEnvironment, ...] = (),
        replicas: int | None = None,
    ) -> Recipe:
        """Return a separate eval recipe for this recipe's model and ``environments`` (default: ``environments.eval``).

        ``model_path``: hub id or folder of version 0, with which engines start. The tokenizer stays that of this
        recipe's model, because renderers are looked up by its name. The adapters of a recipe with ``lora`` are
        evaluated. Tracking is off; enable it again in the eval recipe.
        """
        changes: dict[str, Any] = {"elastic": False, "partition": None, "prefill": None}
        if replicas is not None:
            changes |= {"replicas": replicas, "nodes": "auto"}
        inference = self.layout.inference.model_copy(update=changes)
        tokenizer = self.model.tokenizer or (self.model.name if self.model.name != model_path else None)
        return self.model_copy(
            update={
                "kind": Kind.EVAL,
                "name": f"{self.name}-evaluation"[:100],
                "model": self.model.model_copy(update={"name": model_path, "tokenizer": tokenizer}),
                "max_steps": None,
                "layout": self.layout.model_copy(update={"inference": inference}),
                "environments": Environments(eval=environments or self.environments.eval),
                "evaluation": evaluation,
                "rollouts": Rollouts(
                    sampling=self.rollouts.sampling, max_in_flight=self.rollouts.max_in_flight
                ),
                "tracking": Tracking(),
                **_TRAINING_DEFAULTS,
            }
        )


_TRAINING_DEFAULTS: dict[str, Any] = {
    "algorithm": GRPO(),
    "loss": DPPOLoss(),
    "optimizer": AdamW(),
    "scheduler": Constant(),
    "trainer": TrainerConfig(),
    "sft": None,
    "warmup": None,
    "stop_when": None,
    "checkpoint": Checkpoint(),
    "weights": Weights(),
    "after": None,
}
"""Default values of the blocks that only training uses, for eval recipes."""
