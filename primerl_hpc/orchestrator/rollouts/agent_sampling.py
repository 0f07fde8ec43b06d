"""Check that the agents of a training rollout sampled from the distribution that the trainer computes.

An environment may give an agent its own sampling settings: in its package, or by ``env_args.<agent>.sampling``. Only
the finished episode shows which agents are trained and how they sampled, so the check of the recipe cannot replace this
one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.recipe.schema.cross_checks import other_sampling

if TYPE_CHECKING:
    from verifiers.v1.episode import Episode


def refuse_other_sampling(episode: Episode[Any, Any, Any], environment: str, temperature: float) -> None:
    """Raise ConfigError if a trained agent sampled from another distribution than the trainer computes."""
    for trace in episode.traces:
        sampling = trace.agent.config.sampling if trace.agent.trainable else None
        conflict = (
            other_sampling(sampling.model_dump(exclude_unset=True), temperature)
            if sampling is not None
            else None
        )
        if conflict is not None:
            name, reason = conflict
            raise ConfigError(
                f"its agent {trace.agent.name} sets its own {name}, and {reason}",
                location=f"environment {environment}",
                hint=f"remove {name} from the sampling of that agent, or do not train it",
            )
