"""An environment of the recipe as rollouts use it: its server or servers, and its tasks."""

from __future__ import annotations

from dataclasses import dataclass, field

from primerl_hpc.envs.tasks import EnvironmentTask
from primerl_hpc.orchestrator.rollouts.env_client import EnvServerClient
from primerl_hpc.orchestrator.rollouts.env_pool import EnvServerPool
from primerl_hpc.recipe.schema.rollout import Environment, EvalEnvironment, Sampling


@dataclass
class EnvHandle:
    """One environment of the recipe with its client and tasks."""

    environment: Environment
    client: EnvServerClient | EnvServerPool
    tasks: list[EnvironmentTask] = field(default_factory=list)

    def sampling(self, default: Sampling) -> Sampling:
        """Return the environment's own sampling settings, else ``default``."""
        own = self.environment.sampling if isinstance(self.environment, EvalEnvironment) else None
        return own or default
