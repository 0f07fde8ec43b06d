"""Blocks about the run in general: metric tracking, logs, timeouts, recovery after a failure, checkpoints."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from primerl_hpc.common.block import Block, Bool, Float, PositiveFraction, PositiveInt
from primerl_hpc.common.names import Role
from primerl_hpc.common.safety.secret_values import has_secret_form

# limits of W&B, which refuses longer values when the job runs
WandbName = Annotated[str, Field(min_length=1, max_length=128)]
WandbTag = Annotated[str, Field(min_length=1, max_length=64)]
WandbProject = Annotated[str, Field(pattern=r"^[^/\\#?%:]{1,128}$")]
WandbId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


def _check_url(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError("must start with https:// or http://")
    return _check_no_password(value)


def _check_no_password(value: str) -> str:
    if has_secret_form(value):
        raise ValueError("must not contain a password; tokens are read from environment variables")
    return value


HttpUrl = Annotated[str, AfterValidator(_check_url)]


_KEYS: dict[str, tuple[str, ...]] = {
    "wandb": ("WANDB_API_KEY",),
    "prime": (),
    "mlflow": ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
    "trackio": ("HF_TOKEN",),
}
"""Destination → variables with its keys; none: the one that its block names."""
_OTHERS = ("prime", "mlflow", "trackio", "tensorboard")
"""Destinations besides W&B: keys of ``tracking``."""


class LogExtras(Block):
    """Rollouts that a tracker receives in addition to metrics (kind rl)."""

    samples: Bool = True
    """Send a table with step, environment, task, prompt, completion, reward and advantage of each rollout. Prompts and
    completions longer than 20,000 characters are shortened in the middle."""
    distributions: Bool = True
    """Send the values of reward, advantage, entropy and lengths of all rollouts of a batch."""
    interval: PositiveInt = 10
    """Send them for every n-th batch."""
    sample_ratio: PositiveFraction | None = None
    """Share of the rollouts in a table, chosen at random. Default (null): all."""


class WandbSide(Block):
    """A run in Weights & Biases of only the trainer's, or only the orchestrator's, metrics."""

    name: WandbName | None = None
    """Display name. Default (null): the name of the run and the side."""
    id: WandbId | None = None
    """Id of the run. Default (null): derived from the run directory and the time of its submission."""
    log_extras: LogExtras | None = None
    """Rollouts to send. Default (null): ``tracking.wandb.log_extras``."""


class Wandb(Block):
    """Where a run appears in Weights & Biases."""

    project: WandbProject = "primerl-hpc"
    """Project name, at most 128 characters without / \\ # ? % and colon. Its owner is ``entity``."""
    entity: str | None = None
    """User or team that owns the project. Default (null): the default entity of the API key."""
    group: WandbName | None = None
    """Group of runs within the project, at most 128 characters. Default (null): no group."""
    tags: tuple[WandbTag, ...] = ()
    """Tags of the run, of 1 to 64 characters each."""
    name: WandbName | None = None
    """Display name, at most 128 characters. Default (null): the name of the run directory."""
    id: WandbId | None = None
    """Id of the run, which every attempt continues. An id of another run is refused. Default (null): derived from the
    run directory and the time of its submission."""
    dir: str | None = None
    """Folder in which wandb writes its files. Default (null): the run directory."""
    offline: Bool = False
    """Write to disk only, to be uploaded with ``wandb sync`` later. Setting WANDB_MODE=offline where you submit has the
    same effect."""
    log_extras: LogExtras | None = None
    """Rollouts to send: ``{}`` sends tables and distributions of every tenth batch. Default (null): only metrics."""
    trainer: WandbSide | None = None
    """Send the metrics of the trainer to a run of their own. Default (null): all metrics are in one run."""
    orchestrator: WandbSide | None = None
    """Send the metrics of orchestrator and evaluations, and rollouts, to a run of their own. Default (null): all
    metrics are in one run."""


class Prime(Block):
    """Where a run appears on the platform of Prime Intellect."""

    run_name: str | None = None
    """Display name. Default (null): the name of the recipe."""
    team_id: str | None = None
    """Team that owns the run. Default (null): the owner of the API key."""
    base_url: HttpUrl = "https://api.primeintellect.ai/api/v1/rft"
    """Address of the platform's API."""
    key_variable: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = "PRIME_API_KEY"
    """Environment variable with the API key, read when the job runs."""
    log_extras: LogExtras | None = None
    """Rollouts to send. Samples need pyarrow, which is installed with ``datasets``. Default (null): only metrics."""


class Mlflow(Block):
    """Where a run appears in MLflow. User name, password or token are read from MLflow's own variables."""

    uri: Annotated[str, AfterValidator(_check_no_password)]
    """Address of the tracking server, or another tracking URI of MLflow (``file:///…``, ``sqlite:///…``)."""
    experiment: str = "primerl-hpc"
    """Name of the experiment, which is created if it does not exist."""
    run_name: str | None = None
    """Display name. Default (null): the name of the run directory."""
    log_extras: LogExtras | None = None
    """Rollouts to send, as JSON artifacts ``samples/step_N.json``. Default (null): only metrics."""


class Trackio(Block):
    """Where a run appears in Trackio."""

    project: str = "primerl-hpc"
    """Project name."""
    run_name: str | None = None
    """Display name, which also identifies the run. Default (null): the name of the run directory."""
    space_id: str | None = None
    """Hugging Face Space with the dashboard, ``owner/name``. Default (null): only files of this machine."""


class Tensorboard(Block):
    """Event files for TensorBoard."""

    dir: str | None = None
    """Folder of the event files. Default (null): ``tensorboard`` in the run directory."""


class Tracking(Block):
    """Where metrics are sent in addition to the run directory."""

    wandb: Wandb | None = None
    """Also send metrics to Weights & Biases (extra ``wandb``). The API key is read from WANDB_API_KEY when the job
    runs. Default (null): not to W&B."""
    prime: Prime | None = None
    """Also send metrics to the platform of Prime Intellect. Default (null): not there."""
    mlflow: Mlflow | None = None
    """Also send metrics to MLflow (``pip install mlflow-skinny``). Default (null): not there."""
    trackio: Trackio | None = None
    """Also send metrics to Trackio (``pip install trackio``). Default (null): not there."""
    tensorboard: Tensorboard | None = None
    """Also write event files for TensorBoard (``pip install tensorboard``). Default (null): none."""
    relay: Bool = False
    """True: the job starts no trackers; ``primerl-hpc sync RUN --watch`` sends from a login node, for compute nodes
    without internet."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the destinations; one process of role ``tracker`` sends to each."""
        wandb: list[str] = []
        if self.wandb is not None:
            sides = {"wandb-trainer": self.wandb.trainer, "wandb-orchestrator": self.wandb.orchestrator}
            wandb = [name for name, side in sides.items() if side is not None]
            wandb = wandb if len(wandb) == len(sides) else ["wandb", *wandb]
        return (*wandb, *(name for name in _OTHERS if getattr(self, name) is not None))

    @property
    def key_variables(self) -> tuple[str, ...]:
        """Names of the variables with keys that the destinations read."""
        return tuple(
            name
            for target, names in _KEYS.items()
            if getattr(self, target) is not None
            for name in (names or (getattr(self, target).key_variable,))
        )


LogLevel = Literal["debug", "info", "warning", "error"]


class Log(Block):
    """Levels and format of the logs of the run's processes."""

    level: LogLevel = "info"
    """Lowest level of this package's messages. May be set with PRIMERL_LOG_LEVEL."""
    roles: dict[Role, LogLevel] = Field(default_factory=dict)
    """Levels of single roles, for example ``{trainer: debug}``; they override ``level``. An engine also passes its
    entry to vLLM."""
    verifiers: LogLevel = "warning"
    """Lowest level of the messages of verifiers and of environments in the logs of environment servers. May be set with
    PRIMERL_VF_LOG_LEVEL."""
    format: Literal["text", "json"] = "text"
    """``json``: every message is a JSON object with time, logger, level and text. May also be written as ``json:
    true``."""

    @model_validator(mode="before")
    @classmethod
    def _json_is_another_name(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("json"), bool) and "format" not in value:
            rest = {key: entry for key, entry in value.items() if key != "json"}
            return {**rest, "format": "json" if value["json"] else "text"}
        return value

    def level_of(self, role: Role) -> LogLevel:
        """Return the level of a role's own messages."""
        return self.roles.get(role, self.level)


class StopWhen(Block):
    """A goal: the run saves and is done when a metric reaches a value."""

    metric: str
    """Name of a metric in metrics/*.jsonl, for example ``eval/held-out/reward/mean`` (docs/watching.md lists them)."""
    at_least: Float
    """The value that the metric must reach."""
    consecutive: PositiveInt = 1
    """Number of steps, or of evaluations, in a row at which it must have this value. May also be written as ``for``."""

    @model_validator(mode="before")
    @classmethod
    def _for_is_another_name(cls, value: Any) -> Any:
        if isinstance(value, dict) and "for" in value and "consecutive" not in value:
            return {"consecutive" if key == "for" else key: entry for key, entry in value.items()}
        return value


class KeepBest(Block):
    """The policy versions with the best values of a metric, which stay on disk."""

    metric: str
    """Name of a metric in metrics/*.jsonl, for example ``eval/held-out/reward/mean``. A metric of the orchestrator at
    step n counts for version n - 1, the newest that can have sampled the batch."""
    n: PositiveInt = 1
    """Number of versions to keep."""
    lowest: Bool = False
    """Keep the versions with the lowest values instead of the highest, for example of a loss."""


class Timeouts(Block):
    """How long to wait for another process, in seconds, before it counts as failed."""

    removed: ClassVar[dict[str, str]] = {
        "distributed_s": "raise timeouts.trainer_hang_s: a collective operation may take three times as long"
    }
    inference_ready_s: PositiveInt = 1800
    """Seconds from the start of an engine or of the router until it must respond."""
    env_server_ready_s: PositiveInt = 600
    """Seconds from the start of an environment server until it must respond."""
    weights_s: PositiveInt = 1200
    """Seconds that the orchestrator waits for the next policy version. The trainer waits for the next batch without a
    limit while the run is active."""
    weight_update_s: PositiveInt = 720
    """Seconds that one engine may take to load one policy version."""
    stall_s: PositiveInt = 3600
    """Seconds without a finished rollout or step after which the supervisor considers the run stalled, or ten times the
    longest gap so far if that is longer. The role that blocks progress then dumps its stacks, is terminated, and is
    handled like a process that crashed."""
    health_s: Annotated[int, Field(strict=True, ge=10)] = 300
    """Seconds after which an engine, the router, the teacher, the judge or an environment server that does not respond,
    or an engine that generates no tokens for its requests, is restarted. On a busy machine a healthy server may not
    respond for seconds."""
    trainer_hang_s: PositiveInt = 1200
    """Seconds that one micro-batch, weight export or checkpoint save of the trainer may take. After that every rank
    dumps its stacks, and the run fails with the rank and the collective that hang."""

    @property
    def distributed_s(self) -> int:
        """Return the timeout of one collective operation of the trainer, in seconds."""
        return max(3600, 3 * self.trainer_hang_s)


class Recovery(Block):
    """Recovery from a failure of the trainer or the orchestrator."""

    in_place: Bool = True
    """True: trainer and orchestrator restart from the last complete checkpoint while engines, router and environment
    servers keep running, until the same failure repeats or ``max_without_progress`` is reached. False: the attempt
    ends, and ``primerl-hpc resume`` continues it; only after the loss of a node they restart on a spare node."""
    max_without_progress: PositiveInt = 3
    """Number of recoveries without a new highest step after which the next failure ends the attempt. A failure of the
    same role that repeats at the same step with the same error ends it immediately; a process killed from outside only
    counts toward this limit. The delay between such recoveries increases."""


class Fork(Block):
    """Start from a checkpoint of another run. Its files are hard-linked (or copied) into the new run directory on
    submission."""

    run: str
    """Directory of the other run. Relative paths are resolved against the folder in which you submit."""
    step: PositiveInt | None = None
    """Step of the checkpoint. Default (null): the latest complete checkpoint."""
    skip: tuple[Literal["optimizer", "scheduler", "progress", "data"], ...] = ()
    """Parts of the checkpoint that are not restored; the step number always is.
    ``optimizer``: the optimizer state.
    ``scheduler``: the schedule, so that warm-up and decay start over after the step.
    ``progress``: the number of trained tokens.
    ``data``: the position in datasets and environments."""


class Checkpoint(Block):
    """When the state of trainer and orchestrator is saved, and how many checkpoints are kept."""

    interval: PositiveInt | None = None
    """Steps between checkpoints. Default (null): only on request, before the walltime ends, and at the end."""
    keep_last: PositiveInt = 2
    """Number of complete checkpoints to keep."""
    keep_interval: PositiveInt | None = None
    """Also keep every checkpoint whose step is a multiple of this permanently. Default (null): none."""
    at_end: Bool = True
    """Save a checkpoint after the last step."""
    asynchronous: Bool = True
    """Continue training as soon as the state is copied to host memory, which needs room for the node's share of the
    state. false: wait until the files are written."""
    weights_only: Bool = False
    """Save without the optimizer state: a third of the size with AdamW, but resuming starts with a new optimizer
    state."""
    accept_changed_data: Bool = False
    """Resume although the SFT rows, or the tasks of a training environment, are not those of the checkpoint. SFT
    continues at the same position in the order of the new rows; the curriculum of an environment with other tasks
    starts over. false: such a resume ends with an error."""
    fork: Fork | None = None
    """Start from a checkpoint of another run. Default (null): start from the model."""

    @property
    def copied_state(self) -> Literal["none", "weights", "all"]:
        """State that is copied to host memory to be written. Training continues only during saves at ``interval``."""
        if not self.asynchronous or self.interval is None:
            return "none"
        return "weights" if self.weights_only else "all"
