"""One environment server: ``python -m primerl_hpc.roles.env_server RUN_DIR PHASE env_server-<i>``.

Number i serves the i-th environment of the recipe, train environments first. It is a single process: verifiers' own
worker pool neither restarts a dead worker nor notifies its clients; the supervisor does both for this process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError, PrimerlError, RoleError
from primerl_hpc.common.node.exiting import exit_process
from primerl_hpc.common.node.imports import without_collections
from primerl_hpc.common.safety.error_text import describe_error
from primerl_hpc.common.safety.images import restrict_pillow
from primerl_hpc.envs.config import environment_of
from primerl_hpc.envs.judges import (
    assign_client,
    judge_client,
    judges_without_endpoint,
    neutralize_requests,
    refuse_third_party,
    track_endpoint,
)
from primerl_hpc.envs.processes import cores_here, processes_of, warning_of
from primerl_hpc.envs.serving.deferred import defer_imports
from primerl_hpc.envs.serving.games import share_word_lists
from primerl_hpc.envs.tools import refuse_tools_without_renderer
from primerl_hpc.recipe.control_tokens import control_pattern
from primerl_hpc.recipe.renderer import make_renderer
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.rollout import Environment
from primerl_hpc.roles.scratch import scratch_folder
from primerl_hpc.roles.start import RoleProcess, start_role
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.access.ownership import PRIVATE, WRITABLE_BY_OTHERS
from primerl_hpc.run.endpoints import publish_endpoint
from primerl_hpc.run.ports import listen_host


def main(argv: list[str]) -> int:
    defer_imports()
    return start_role("env_server", argv, serve)


def serve(role: RoleProcess) -> None:
    """Serve until SIGTERM.

    Raises ConfigError if the environment cannot be loaded, the model's template cannot be rendered, or a judge has no
    address.
    """
    split, environment = environment_of(role.recipe, role.index)
    # the returned episode contains a failed model call; a line per try would flood the log when an engine is lost
    if role.recipe.log.verifiers not in ("debug", "info"):
        logging.getLogger("verifiers.v1.interception").setLevel(logging.ERROR)
    # requests contain the name of the variable that holds the engines' key, never the key
    keys = run_keys(role.run)
    env.set_engine_api_key(keys.api_key)
    with scratch_folder(role.run, role.process) as scratch:
        with home_for_caches(), without_collections():
            from verifiers.v1.serve import serve_env
        from primerl_hpc.envs.curve import serve_with_curve
        from primerl_hpc.envs.serving.in_process import track_servers
        from primerl_hpc.envs.serving.server import adapt_server
        from primerl_hpc.envs.serving.token_client import use_token_client
        from primerl_hpc.envs.serving.tokenizers import load_tokenizers
        from primerl_hpc.envs.tasks import resolve_environment
        from primerl_hpc.envs.tls import trust_run

        use_working_folder(scratch)
        trust_run(keys)
        adapt_server()
        track_servers()
        use_token_client(keys)
        serve_with_curve(keys.curve("env_server"), key_variables(role.recipe), role.phase.num_ranks)
        restrict_pillow()  # renderers open the images of messages
        config = resolve_environment(environment)
        share_word_lists(environment.id)
        connect_judges(role, environment, config)
        policy, judge = load_tokenizers(role.recipe)
        renderer = None if policy is None else make_renderer(role.recipe.model, policy)
        neutralize_requests(*(control_pattern(known) for known in (policy, judge) if known is not None))
        publisher = _Publisher(role, {"env": environment.label, "split": split})
        try:
            if not role.recipe.is_external:
                refuse_tools_without_renderer(environment, config, role.recipe.model, renderer)
            processes, cores = processes_of(config), cores_here()
            publisher.details |= {"processes": processes, "cores": cores}
            if processes:
                role.logger.warning(warning_of(environment, processes, cores))
            serve_env(
                max_workers=1,
                address=f"tcp://{listen_host(role.plan.num_hosts)}:0",
                address_queue=publisher,
                config=config,
                max_concurrent=environment.max_concurrent or (cores if processes else None),
            )
        except PrimerlError:
            raise
        except Exception as error:
            raise server_failure(error, environment, is_published=publisher.is_published) from error


def server_failure(error: Exception, environment: Environment, *, is_published: bool) -> PrimerlError:
    """Return a ConfigError, which ends the run, or a RoleError if the server has served: it may not fail again."""
    kind = RoleError if is_published else ConfigError
    return kind(f"its server failed: {describe_error(error)}", location=f"environment {environment.label}")


def connect_judges(role: RoleProcess, environment: Environment, config: Any) -> None:
    """Send requests of judges in ``config`` to the run's judge. Raises ConfigError if there is none for them."""
    judge, judges = role.recipe.judge, judges_without_endpoint(config)
    if judge is None or not judges:
        return refuse_third_party(judges, location=f"environment {environment.label}")
    timeout_s = role.recipe.timeouts.inference_ready_s
    client = judge_client(role.run, judge, index=role.index, timeout_s=timeout_s)
    assign_client(judges, client)
    track_endpoint(judges, role.run, judge, index=role.index)
    role.logger.info("%d judges send requests to %s", len(judges), client["base_url"])


def key_variables(recipe: Recipe) -> frozenset[str]:
    """Return the names of variables with API keys of the models that rollouts of this recipe may use."""
    servers = [recipe.teacher, recipe.evaluation.external if recipe.evaluation else None]
    named = {server.key_variable for server in servers if server is not None and server.key_variable}
    return frozenset(named | {env.ENGINE_API_KEY, env.NO_KEY})


class _Publisher:
    """Queue on which verifiers puts the bound address once the environment is loaded; publishes it as an endpoint."""

    def __init__(self, role: RoleProcess, details: dict[str, Any]) -> None:
        """``details``: fields of the endpoint in addition to the address."""
        self.role, self.details = role, details
        self.is_published = False

    def put(self, address: str) -> None:
        publish_endpoint(self.role.run, self.role.process, address, **self.details)
        self.is_published = True
        self.role.logger.info(
            "Environment %s (%s) is served at %s", self.details["env"], self.details["split"], address
        )


@contextlib.contextmanager
def home_for_caches() -> Iterator[None]:
    """Set HOME while verifiers is imported, which derives its cache folders (images, data sets, scripts) from it.

    The caches are the user's own and survive restarts and runs. If HOME is not writable, as on compute nodes of some
    sites, a folder on the node replaces it; the Hugging Face cache, which may have been filled elsewhere, stays the
    user's.
    """
    home = Path.home()
    if os.access(_nearest_existing(home / ".cache" / "verifiers"), os.W_OK | os.X_OK):
        yield
        return
    fallback = Path(tempfile.gettempdir()) / f"primerl-{os.getuid()}-home"
    fallback.mkdir(mode=PRIVATE, exist_ok=True)
    # any user may have created it, and prepared scripts and images of this cache are executed
    found = fallback.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & WRITABLE_BY_OTHERS:
        raise ConfigError(
            "needed for caches because HOME is not writable, but it is not a folder that only this user can write",
            location=str(fallback),
            hint="remove it, or set HOME to a writable folder (env_by_role.env_server of the recipe)",
        )
    caches = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    os.environ.setdefault("HF_HOME", str(caches / "huggingface"))
    os.environ["HOME"] = str(fallback)
    try:
        yield
    finally:
        os.environ["HOME"] = str(home)


def _nearest_existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def use_working_folder(folder: Path) -> None:
    """Create episodes' working folders in ``folder``: verifiers 0.4.0 would leave them in its cache."""
    from verifiers.v1.runtimes import subprocess

    subprocess.CACHE_DIR = folder


if __name__ == "__main__":
    # everything is closed; finalizing the imported libraries would delay a stop by seconds
    exit_process(main(sys.argv[1:]))
