"""The recipe: *what* to train, one path per setting.

`Recipe` mirrors the YAML top to bottom. Blocks about the run as a whole are in ``run_schema.py``, about models in
``model_schema.py``, about what runs where in ``layout_schema.py``, about rollouts in ``rollout_schema.py`` and
``algorithm_schema.py``, about the optimizer, losses, data and checkpoints in ``training_schema.py``. Values that several
roles need are written once and read from here by all of them. Derived values are properties.
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
from primerl_hpc.recipe.algorithm_schema import GRPO, NEED_TEACHER, SCORED, Algorithm
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

ROUTERS = ("gate", "router")  # what mixtures of experts of all families call theirs
MAX_SERVED_RANK = 512  # vLLM 0.31's largest --max-lora-rank


class Recipe(Block):
    """Everything about *what* to train; *where* is the cluster profile's."""

    kind: Kind
    """rl | sft | eval | inference"""
    name: str
    """Name of the run: job name, run directory, tracking."""
    model: Model
    seq_len: PositiveInt = 2048
    """Tokens of one packed row, and the longest sample that is trained on."""
    max_steps: PositiveInt | None = None
    """Trainer steps; required by rl and sft."""
    seed: NonNegativeInt = 42
    layout: Layout = Layout()
    environments: Environments = Environments()
    rollouts: Rollouts = Rollouts()
    algorithm: Algorithm = GRPO()
    """How rewards become advantages; an environment may have its own."""
    teacher: Teacher | None = None
    """Whom algorithms opd and sft_distill learn from."""
    judge: Judge | None = None
    """kinds rl and eval: whom the environments' judges ask."""
    loss: Loss = DPPOLoss()
    optimizer: Optimizer = AdamW()
    scheduler: Scheduler = Constant()
    lora: LoRA | None = None
    """kinds rl and sft: train adapters in place of the model's weights. An eval recipe need not say it: the weights do."""
    trainer: Trainer = Trainer()
    inference: Inference = Inference()
    sft: SFT | None = None
    """Supervised fine-tuning: required by kind sft."""
    warmup: Warmup | None = None
    """kind rl: an SFT phase before RL; its last weights are policy v0."""
    checkpoint: Checkpoint = Checkpoint()
    weights: Weights = Weights()
    evaluation: Evaluation | None = None
    """kind eval: which policies, of which weights or behind which server; null: the model alone."""
    after: After | None = None
    """kinds rl and sft: jobs that start when the run is done: an export, an evaluation."""
    tracking: Tracking = Tracking()
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

    @field_validator("env")
    @classmethod
    def _env_is_ours_to_set(cls, value: dict[str, str]) -> dict[str, str]:
        if bad := [name for name in value if name.startswith("PRIMERL_") or not name.isidentifier()]:
            raise ValueError(f"{bad[0]!r} is not a variable a recipe may set")
        return value

    @model_validator(mode="after")
    def _kind_has_its_blocks(self) -> Self:
        if self.kind in (Kind.RL, Kind.SFT) and self.max_steps is None:
            raise ValueError(f"kind {self.kind} needs max_steps")
        if self.kind == Kind.RL and not self.environments.train:
            raise ValueError("kind rl needs at least one environment under environments.train")
        is_sampled = any(algorithm.samples_from == "policy" for algorithm in self.algorithms)
        if self.kind == Kind.RL and is_sampled and self.rollouts.sampling.temperature == 0:
            raise ValueError(
                "kind rl needs a rollouts.sampling.temperature above 0; an evaluation may have its own sampling"
            )
        if self.kind == Kind.EVAL and not self.environments.eval:
            raise ValueError("kind eval needs at least one environment under environments.eval")
        if self.kind == Kind.SFT and self.sft is None:
            raise ValueError("kind sft needs an sft block")
        if self.evaluation is not None and self.kind != Kind.EVAL:
            raise ValueError(
                "evaluation belongs to kind eval; what comes after a training run is after.evaluation"
            )
        if self.warmup is not None and self.kind != Kind.RL:
            raise ValueError("warmup belongs to kind rl")
        if (fork := self.checkpoint.fork) is not None:
            if self.kind not in (Kind.RL, Kind.SFT) or self.warmup is not None:
                raise ValueError("checkpoint.fork belongs to kinds rl and sft without a warmup")
            if fork.step is not None and self.max_steps is not None and fork.step >= self.max_steps:
                raise ValueError(
                    f"checkpoint.fork.step {fork.step} must be below max_steps {self.max_steps}: steps count on"
                )
        if self.rollouts.batch_size % self.rollouts.group_size:
            raise ValueError(
                f"rollouts.batch_size {self.rollouts.batch_size} must be a multiple of "
                f"rollouts.group_size {self.rollouts.group_size}"
            )
        has_rollouts = self.kind in (Kind.RL, Kind.EVAL) or (self.after and self.after.evaluation)
        if has_rollouts and self.rollouts.sampling.max_tokens >= self.max_model_len:
            raise ValueError(
                f"rollouts.sampling.max_tokens {self.rollouts.sampling.max_tokens} leaves no room for a prompt "
                f"in {self.max_model_len} tokens"
            )
        return self

    @model_validator(mode="after")
    def _after_has_its_blocks(self) -> Self:
        if self.after is None:
            return self
        if self.kind not in (Kind.RL, Kind.SFT):
            raise ValueError(f"after belongs to kinds rl and sft: a run of kind {self.kind} trains nothing")
        if self.after.export is not None and self.after.export.merge and self.lora is None:
            raise ValueError("after.export.merge is for recipes with lora: this one trains a whole model")
        evaluation = self.after.evaluation
        if evaluation is not None and not (evaluation.environments or self.environments.eval):
            raise ValueError("after.evaluation needs environments, its own or environments.eval")
        return self

    @model_validator(mode="after")
    def _adapters_can_be_served(self) -> Self:
        if self.lora is None:
            return self
        is_evaluation = self.evaluation is not None and self.evaluation.weights is not None
        if self.kind not in (Kind.RL, Kind.SFT) and not is_evaluation:
            raise ValueError(
                f"lora belongs to kinds rl and sft, and to evaluations of their weights: a run of kind {self.kind} "
                f"trains no adapters"
            )
        if self.kind == Kind.RL and self.lora.dropout:
            raise ValueError(
                "lora.dropout belongs to kind sft: in rl the trainer would judge tokens by a policy that no engine sampled"
            )
        is_served = self.kind != Kind.SFT or (self.after is not None and self.after.evaluation is not None)
        if is_served and self.lora.rank > MAX_SERVED_RANK:
            raise ValueError(
                f"lora.rank {self.lora.rank} is above {MAX_SERVED_RANK}, the most that vLLM serves"
            )
        if self.trainer.vision == "trained":
            raise ValueError(
                "trainer.vision trained is for whole models: with lora, adapters alone are trained"
            )
        if self.weights.transport != "filesystem":
            raise ValueError(
                f"weights.transport {self.weights.transport} is for whole models: with lora, versions are adapters and as small already"
            )
        if self.name == self.model.name:
            raise ValueError(
                f"name must differ from model.name with lora: engines serve the adapter as {self.name}"
            )
        return self

    @property
    def policy_name(self) -> str:
        """What engines call the policy: the model, or the adapter of a run that trains one."""
        return self.name if self.lora is not None else self.model.name

    @model_validator(mode="after")
    def _tokens_can_be_carried(self) -> Self:
        if self.layout.trainer.expert_backend == "deepep" and self.trainer.param_dtype != "bfloat16":
            raise ValueError(
                f"layout.trainer.expert_backend deepep carries bfloat16 alone, and trainer.param_dtype is "
                f"{self.trainer.param_dtype}: set that to bfloat16, or expert_backend to torch"
            )
        return self

    @model_validator(mode="after")
    def _routers_can_be_replayed(self) -> Self:
        if not self.trainer.router_replay:
            return self
        if self.kind != Kind.RL:
            raise ValueError(
                f"trainer.router_replay belongs to kind rl: in kind {self.kind} no engine samples"
            )
        if self.inference.kv_offload_gib is not None:
            raise ValueError(
                "trainer.router_replay and inference.kv_offload_gib exclude each other: of tokens whose KV blocks come "
                "back from the host, an engine may have forgotten the experts"
            )
        parts = self.trainer.activation_checkpointing
        alone = [] if isinstance(parts, str) else [each for each in parts if each.split(".")[-1] in ROUTERS]
        if alone:
            raise ValueError(
                f"trainer.router_replay and activation_checkpointing [{alone[0]}] exclude each other: name the whole "
                "mixture, as in [mlp]; a router that is recomputed alone chooses for itself"
            )
        return self

    @property
    def replays_routers(self) -> bool:
        """Whether engines return the experts they chose and the trainer chooses the same."""
        return self.kind == Kind.RL and self.trainer.router_replay

    @model_validator(mode="after")
    def _teacher_is_there_where_it_is_needed(self) -> Self:
        needed = [kind for kind in self.algorithm_types if kind in NEED_TEACHER]
        if needed and self.teacher is None:
            raise ValueError(f"algorithm {needed[0]} needs a teacher")
        if self.kind == Kind.RL and self.teacher is not None and not needed:
            raise ValueError(f"a teacher is given and no algorithm uses it; {' and '.join(NEED_TEACHER)} do")
        scored = [kind for kind in self.algorithm_types if kind in SCORED]
        if scored and self.rollouts.sampling.temperature != 1:
            raise ValueError(
                f"algorithm {scored[0]} compares with log-probabilities of temperature 1, and "
                f"rollouts.sampling.temperature is {self.rollouts.sampling.temperature}"
            )
        return self

    @model_validator(mode="after")
    def _judge_has_a_place(self) -> Self:
        if self.judge is not None and self.kind not in (Kind.RL, Kind.EVAL):
            raise ValueError(f"judge belongs to kinds rl and eval: a run of kind {self.kind} has no rollouts")
        if self.is_external and Role.JUDGE in self.served_models:
            raise ValueError("a run of evaluation.external starts no engines: give its judge a base_url")
        return self

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

    @model_validator(mode="after")
    def _prefill_fits(self) -> Self:
        layout = self.layout.inference
        if layout.prefill is None:
            return self
        if self.is_external:
            raise ValueError("layout.inference.prefill: a run of evaluation.external starts no engines")
        if self.lora is not None:
            raise ValueError("layout.inference.prefill is for whole models: leave out prefill or lora")
        if self.replays_routers:
            raise ValueError(
                "trainer.router_replay needs every token's experts of one engine, and those of prompts stay with "
                "the engine that layout.inference.prefill reads them in: leave out one of the two"
            )
        for key in ("kv_offload_gib", "recompute_kv_on_update"):
            if getattr(self.inference, key):
                raise ValueError(
                    f"layout.inference.prefill hands KV blocks from engine to engine, which excludes inference.{key}"
                )
        sizes = {layout.accelerators_per_replica, layout.prefill.accelerators_per_replica}
        if self.weights.transport == "broadcast" and len(sizes) > 1:
            raise ValueError(
                "weights.transport broadcast seats engines of one size: give layout.inference.prefill as many "
                "accelerators as the engines that decode, or choose another transport"
            )
        return self

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
                "weights": self.weights.model_copy(update={"interval": None}),
                "lora": None,
                "warmup": None,
                "judge": None,
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
