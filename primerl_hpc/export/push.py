"""Upload an exported folder to the Hugging Face hub: ``primerl-hpc export RUN --to DIR --push owner/name``.

The repository is created as a private one unless it exists or ``--public`` is given. All files are added in one commit;
files that are already in the repository and that the folder does not have are kept. The hub verifies the SHA-256 of
each large file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from primerl_hpc.common.errors import ConfigError, NotFoundError
from primerl_hpc.common.safety.error_text import describe_error
from primerl_hpc.export.export import Exported
from primerl_hpc.recipe.hub import is_hub_id
from primerl_hpc.transport.weights.filesystem import MANIFEST

NOT_PUSHED = (MANIFEST,)
"""Files of a policy version that only this project reads."""


@dataclass(frozen=True)
class Pushed:
    repository: str
    commit: str
    url: str


def check_push(repository: str) -> None:
    """Raise ConfigError before the export if ``--push`` cannot work: an invalid name, no package, no token."""
    if not is_hub_id(repository):
        raise ConfigError(f"--push {repository} does not have the form owner/name")
    try:
        from huggingface_hub import constants, get_token
    except ImportError:
        raise ConfigError(
            "--push needs package huggingface_hub", hint="pip install huggingface_hub"
        ) from None
    if constants.is_offline_mode():
        raise ConfigError("--push needs the hub, and HF_HUB_OFFLINE is set", hint="unset HF_HUB_OFFLINE")
    if get_token() is None:
        raise ConfigError(
            "--push needs a token of the Hugging Face hub with the right to write",
            hint="export HF_TOKEN, or log in with: hf auth login",
        )


def push_folder(done: Exported, repository: str, *, run: str, public: bool = False) -> Pushed:
    """Upload an exported folder. Raises NotFoundError or ConfigError with the hub's reason; the folder is kept."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    hint = f"the export is in {done.folder}; upload it later: hf upload {repository} {done.folder}"
    message = f"Policy version {done.step} of run {run}"
    api = HfApi()
    try:
        api.create_repo(repository, private=not public, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=Path(done.folder),
            commit_message=message,
            ignore_patterns=list(NOT_PUSHED),
        )
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status in (401, 403):
            raise ConfigError(
                f"the hub refused to write to {repository} (HTTP {status}): {describe_error(error)}",
                hint=f"use a token with the right to write; {hint}",
            ) from error
        raise NotFoundError(
            f"the hub did not accept {repository}: {describe_error(error)}", hint=hint
        ) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in (
            "httpx",
            "httpcore",
            "huggingface_hub",
            "requests",
        ):
            raise
        raise NotFoundError(f"the hub does not respond: {describe_error(error)}", hint=hint) from error
    return Pushed(repository, commit.oid, str(commit.repo_url))
