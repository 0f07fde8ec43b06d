"""The recipe: *what* to train, one path per setting.

`Recipe` mirrors the YAML top to bottom. Blocks about the run as a whole are in ``run_schema.py``, about models in
``model_schema.py``, about what runs where in ``layout_schema.py``, about rollouts in ``rollout_schema.py`` and
``algorithm_schema.py``, about the optimizer, losses, data and checkpoints in ``training_schema.py``. Values that several
roles need are written once and read from here by all of them. Derived values are properties; which blocks need or exclude
one another is in ``combinations.py``.
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
from primerl_hpc.recipe.after_schema import After
from primerl_hpc.recipe.algorithm_schema import GRPO, Algorithm
from primerl_hpc.recipe.combinations import check_combinations
from primerl_hpc.recipe.evaluation_schema import Evaluation
from primerl_hpc.recipe.layout_schema import FrozenLayout, InferenceLayout, Layout, PrefillLayout
from primerl_hpc.recipe.model_schema import FrozenModel, Inference, Judge, Model, Teacher
from primerl_hpc.recipe.rollout_schema import Environments, EvalEnvironment, Rollouts
from primerl_hpc.recipe.run_schema import Recovery, Timeouts, Tracking
from primerl_hpc.recipe.sft_schema import SFT
from primerl_hpc.recipe.training_schema import (
    AdamW,
    Checkpoint,
    Constant,
    DPPOLoss,
    LoRA,
    Loss,
    Optimizer,
    Scheduler,
    Trainer,
    Warmup,
    Weights,
)


class Recipe(Block):
    """Everything about *what* to train; *where* is the cluster profile's."""

    kind: Kind
    """rl | sft | eval | inference"""
    name: str
    """Name of the run: job name, run directory, tracking."""
    model: Model
    """What is trained, evaluated or served."""
    seq_len: PositiveInt = 2048
    """Tokens of one packed row, and the longest sample that is trained on."""
    max_steps: PositiveInt | None = None
    """Trainer steps; required by rl and sft."""
    seed: NonNegativeInt = 42
    """Of all that is drawn at random: orders of tasks and data, fresh adapters, engines."""
    layout: Layout = Layout()
    """What runs on how many nodes and accelerators."""
    environments: Environments = Environments()
    """Where tasks and rewards come from."""
    rollouts: Rollouts = Rollouts()
    """How many, how sampled, which are trained on."""
    algorithm: Algorithm = GRPO()
    """How rewards become advantages; an environment may have its own."""
    teacher: Teacher | None = None
    """Whom algorithms opd and sft_distill learn from."""
    judge: Judge | None = None
    """kinds rl and eval: whom the environments' judges ask."""
    loss: Loss = DPPOLoss()
    """kind rl: what the trainer makes of advantages and log-probabilities."""
    optimizer: Optimizer = AdamW()
    """How gradients move the weights."""
    scheduler: Scheduler = Constant()
    """How the learning rate changes over the steps."""
    lora: LoRA | None = None
    """kinds rl and sft: train adapters in place of the model's weights. An eval recipe need not say it: the weights do."""
    trainer: Trainer = Trainer()
    inference: Inference = Inference()
    sft: SFT | None = None
    """Supervised fine-tuning: required by kind sft."""
    warmup: Warmup | None = None
    """kind rl: an SFT phase before RL; its last weights are policy v0."""
    checkpoint: Checkpoint = Checkpoint()
    """When state is saved to resume from, and how much of it is kept."""
    weights: Weights = Weights()
    """How policy versions travel to the engines, and which stay on disk."""
    evaluation: Evaluation | None = None
    """kind eval: which policies, of which weights or behind which server; null: the model alone."""
    after: After | None = None
    """kinds rl and sft: jobs that start when the run is done: an export, an evaluation."""
    tracking: Tracking = Tracking()
    """Where metrics go besides the run directory."""
    timeouts: Timeouts = Timeouts()
    recovery: Recovery = Recovery()
    env: Variables = Field(default_factory=dict)
    """Environment variables for every role; a profile's are below, these win."""

    @field_validator("name")
    @classmethod
    def _name_is_a_file_name(cls, value: str) -> str:
        if not is_valid_name(value):
            raise ValueError(
                "must be 1 to 100 letters, digits, '.', '_' or '-', starting with a letter or digit"
            )
        return value

    @model_validator(mode="after")
    def _blocks_fit_together(self) -> Self:
        check_combinations(self)
        return self

    @property
    def policy_name(self) -> str:
        """What engines call the policy: the model, or the adapter of a run that trains one."""
        return self.name if self.lora is not None else self.model.name

    @property
    def replays_routers(self) -> bool:
        """Whether engines return the experts they chose and the trainer chooses the same."""
        return self.kind == Kind.RL and self.trainer.router_replay

    @property
    def served_models(self) -> dict[Role, FrozenModel]:
        """Frozen models that the run itself serves, by the role of their engines."""
        models = {Role.TEACHER: self.teacher, Role.JUDGE: self.judge}
        kinds = {Role.TEACHER: (Kind.RL,), Role.JUDGE: (Kind.RL, Kind.EVAL)}
        return {
            role: model
            for role, model in models.items()
            if model is not None and model.base_url is None and self.kind in kinds[role]
        }

    @property
    def engines_beside(self) -> dict[Role, PrefillLayout | FrozenLayout]:
        """Engines that the run starts beside the policy's behind the router, by their role, in the order of their nodes."""
        frozen = {role: model.layout for role, model in self.served_models.items()}
        prefill = self.layout.inference.prefill
        return frozen if prefill is None or self.kind == Kind.SFT else {Role.PREFILL: prefill, **frozen}

    @property
    def env_server_ready_s(self) -> int:
        """An environment server waits for the judge first."""
        judge_s = self.timeouts.inference_ready_s if Role.JUDGE in self.served_models else 0
        return self.timeouts.env_server_ready_s + judge_s

    @property
    def algorithms(self) -> list[Algorithm]:
        """Of each training environment."""
        return [each.algorithm or self.algorithm for each in self.environments.train]

    @property
    def algorithm_types(self) -> list[str]:
        return [algorithm.type for algorithm in self.algorithms]

    @property
    def max_model_len(self) -> int:
        return self.seq_len if self.inference.max_model_len == "auto" else self.inference.max_model_len

    @property
    def steps(self) -> int:
        """max_steps of a kind that has steps."""
        assert self.max_steps is not None  # validated above
        return self.max_steps

    def for_warmup(self) -> Recipe:
        """The warm-up phase as an sft recipe of its own: same model, its own data, steps and optimizer.

        It trains all weights: policy v0 is a whole model, on which an RL phase may train adapters.
        """
        assert self.warmup is not None
        return self.model_copy(
            update={
                "kind": Kind.SFT,
                "max_steps": self.warmup.max_steps,
                "optimizer": self.warmup.optimizer,
                "scheduler": self.warmup.scheduler,
                "sft": self.warmup.sft,
                "checkpoint": self.warmup.checkpoint,
                "weights": Weights(keep_last=self.weights.keep_last),
                "trainer": self.trainer.model_copy(update={"router_replay": False}),
                "lora": None,
                "warmup": None,
                "teacher": None,
                "judge": None,
                "evaluation": None,
                "after": None,
            }
        )

    @property
    def is_external(self) -> bool:
        """Whether the model that is evaluated is served by somebody else."""
        return self.evaluation is not None and self.evaluation.external is not None

    def for_prefill(self) -> Recipe:
        """What the engines that prefill serve: the policy, in a shape of their own."""
        layout = self.layout.inference
        assert layout.prefill is not None
        shape = layout.prefill.model_dump(exclude={"replicas"})
        return self.model_copy(update={"layout": Layout(inference=layout.model_copy(update=shape))})

    def for_frozen(self, role: Role) -> Recipe:
        """What the engines of a teacher or judge serve, in the place of the policy."""
        frozen = self.served_models[role]
        inference = frozen.inference
        if inference.max_model_len == "auto":
            longest = self.seq_len + 1 if role == Role.TEACHER else 2 * self.max_model_len
            inference = inference.model_copy(update={"max_model_len": longest})
        layout = InferenceLayout.model_validate(frozen.layout.model_dump())
        return self.model_copy(
            update={
                "model": frozen.model,
                "inference": inference,
                "layout": Layout(inference=layout),
                "lora": None,
                "trainer": Trainer(),
            }
        )

    def for_evaluation(
        self,
        evaluation: Evaluation,
        *,
        model_path: str,
        environments: tuple[EvalEnvironment, ...] = (),
        replicas: int | None = None,
    ) -> Recipe:
        """An eval recipe of its own on this one's model and ``environments`` (default: its ``environments.eval``).

        ``model_path``: hub id or folder that is version 0, and that engines start with. The model stays the tokenizer:
        renderers are found by its name. Of a recipe with adapters it evaluates these. Nothing is sent to a tracker: that has to be asked for again.
        """
        alone: dict[str, Any] = {"elastic": False, "partition": None, "prefill": None}
        if replicas is not None:
            alone |= {"replicas": replicas, "nodes": "auto"}
        inference = self.layout.inference.model_copy(update=alone)
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
                **_OF_TRAINING,
            }
        )


_OF_TRAINING: dict[str, Any] = {
    "algorithm": GRPO(),
    "loss": DPPOLoss(),
    "optimizer": AdamW(),
    "scheduler": Constant(),
    "trainer": Trainer(),
    "sft": None,
    "warmup": None,
    "checkpoint": Checkpoint(),
    "weights": Weights(),
    "after": None,
}
"""What an evaluation knows nothing of."""
