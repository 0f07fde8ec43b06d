"""One environment server: ``python -m primerl_hpc.roles.env_server RUN_DIR PHASE env_server-<i>``.

Number i serves the i-th environment of the recipe, train ones first. It is a single process: verifiers' own worker
pool neither restarts a dead worker nor tells its clients; the supervisor does both for this one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError, PrimerlError
from primerl_hpc.common.listen import listen_host
from primerl_hpc.common.rundir import ensure_api_key, publish_endpoint
from primerl_hpc.envs.config import environment_of
from primerl_hpc.envs.judges import appoint, follow, homeless_judges, judge_client
from primerl_hpc.recipe.renderer import load_tokenizer, make_renderer
from primerl_hpc.recipe.schema import Recipe
from primerl_hpc.roles.scratch import scratch_folder
from primerl_hpc.roles.start import RoleProcess, start_role


def main(argv: list[str]) -> int:
    return start_role("env_server", argv, serve)


def serve(role: RoleProcess) -> None:
    """Serve until SIGTERM. Raises ConfigError when the environment cannot be loaded, or the model's template not rendered."""
    split, environment = environment_of(role.recipe, role.index)
    # a failed model call is in the episode that we hand back; a line for each try would fill the log of a lost engine
    logging.getLogger("verifiers.v1.interception").setLevel(logging.ERROR)
    # requests name the variable that holds the engines' key, never the key
    env.set_engine_api_key(ensure_api_key(role.run))
    with scratch_folder(role.run, role.process) as scratch:
        with home_at(scratch):
            from verifiers.v1.serve import serve_env
        from primerl_hpc.envs.tasks import resolve_environment

        config = resolve_environment(environment)
        judge, judges = role.recipe.judge, homeless_judges(config)
        if judge is not None and judges:
            timeout_s = role.recipe.timeouts.inference_ready_s
            client = judge_client(role.run, judge, index=role.index, timeout_s=timeout_s)
            appoint(judges, client)
            follow(judges, role.run, judge, index=role.index)
            role.logger.info("%d judges ask %s", len(judges), client["base_url"])
        elif judges:
            role.logger.warning(
                "environment %s has a judge without an address and the recipe has no judge: verifiers' default, %s, is asked",
                environment.label,
                judges[0].base_url,
            )
        if _renders_for(role.recipe):
            make_renderer(role.recipe.model, load_tokenizer(role.recipe.model))
        try:
            serve_env(
                max_workers=1,
                address=f"tcp://{listen_host(role.plan.num_hosts)}:0",
                address_queue=_Publisher(role, environment.label, split),
                config=config,
                max_concurrent=environment.max_concurrent,
            )
        except PrimerlError:
            raise
        except Exception as error:
            raise ConfigError(
                f"its server failed: {type(error).__name__}: {error}",
                place=f"environment {environment.label}",
            ) from error


def _renders_for(recipe: Recipe) -> bool:
    """Whether rollouts are token ids; a model elsewhere, or a teacher that samples, is asked by messages."""
    is_elsewhere = recipe.evaluation is not None and recipe.evaluation.external is not None
    return not is_elsewhere and all(algorithm.samples_from == "policy" for algorithm in recipe.algorithms)


class _Publisher:
    """verifiers puts the bound address on a queue once the environment is loaded; this one publishes it."""

    def __init__(self, role: RoleProcess, label: str, split: str) -> None:
        self.role, self.label, self.split = role, label, split

    def put(self, address: str) -> None:
        publish_endpoint(self.role.run, self.role.process, address, env=self.label, split=self.split)
        self.role.logger.info("environment %s (%s) at %s", self.label, self.split, address)


@contextlib.contextmanager
def home_at(folder: Path) -> Iterator[None]:
    """For the import of verifiers: it derives the place of its working state from HOME then, and nothing else moves it.

    The Hugging Face cache is derived in the same import and stays the user's.
    """
    home = Path.home()
    os.environ.setdefault("HF_HOME", str(home / ".cache" / "huggingface"))
    os.environ["HOME"] = str(folder)
    try:
        yield
    finally:
        os.environ["HOME"] = str(home)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is closed; taking the imported libraries apart would take seconds of a stop
