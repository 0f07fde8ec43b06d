"""Mixin that vLLM adds to its worker class (``--worker-extension-cls``): load a policy version in place.

The routes call ``primerl_prepare_update(body)`` on every worker of every data-parallel rank with the orchestrator's
request (`transport.weights.sources`). Each worker checks the complete folder without changing its weights, so a damaged
folder yields an error response and the engine continues to serve. If all workers succeed,
``primerl_update_weights(body)`` loads the tensors as a stream: a rank keeps only its slices, and a node's memory may
not hold a full copy per rank.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.errors import DataError, RoleError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.model_files import TensorInfo
from primerl_hpc.inference.checkpoint import check_same_model, read_headers
from primerl_hpc.inference.worker.mirror import Mirror
from primerl_hpc.inference.worker.start_times import record_start_times
from primerl_hpc.run.access.keys import RunKeys, run_keys
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.base_models.snapshots import local_snapshot
from primerl_hpc.transport.weights.filesystem import MANIFEST
from primerl_hpc.transport.weights.sources import DeltaChain, RankAssignment, from_body

logger = logging.getLogger(__name__)
record_start_times()  # vLLM imports this module in every worker before it loads the model


class WeightUpdate:
    """Methods and attributes have the prefix ``primerl``: vLLM rejects an extension that shadows the worker's own."""

    _primerl_prepared: tuple[int, dict[str, TensorInfo] | None, Iterator[tuple[str, Any]]] | None = None
    """Version, names and shapes (None if the trainer sends them), and the open stream of tensors."""

    def primerl_prepare_update(self, body: dict[str, Any]) -> dict[str, Any]:
        """Check and open the source in ``body``: a folder, a hub id in the cache, a chain, or the trainer's group.

        Does not change weights. Returns ``{"rank", "version"}``, or ``{"rank", "error"}`` if this worker cannot load
        it.
        """
        from primerl_hpc.inference import vllm_compat

        self._primerl_prepared = None
        result: dict[str, Any] = {"rank": vllm_compat.worker_index(self)}
        source, version = from_body(body)
        try:
            if isinstance(source, RankAssignment):
                self._primerl_prepared = version, None, self._primerl_join(source).receive()
            else:
                self._primerl_prepared = version, *self._primerl_open(source, version)
        except (DataError, RoleError, OSError) as error:
            return result | {"error": str(error)}
        return result | {"version": version}

    def primerl_discard_update(self, body: dict[str, Any]) -> dict[str, Any]:
        """Discard the prepared update, because another worker cannot load it."""
        self._primerl_prepared = None
        return {"version": body["version"]}

    def primerl_update_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        """Load the prepared update in place. Returns ``{"rank", "version", "num_parameters"}``, the number written.

        Raises if the load fails or does not write every parameter: the model is then incomplete and the engine must
        exit.
        """
        from primerl_hpc.inference import vllm_compat
        from primerl_hpc.inference.worker.reload import reload_weights

        prepared, self._primerl_prepared = self._primerl_prepared, None
        if prepared is None or prepared[0] != body["version"]:
            raise RoleError(f"policy version {body['version']} was not prepared")
        version, tensors, stream = prepared
        received: set[str] = set()
        num_parameters = reload_weights(self, _collect_names(stream, received))
        if tensors is None:
            reference = self._primerl_reference(vllm_compat.model_config(self).model) or {}
            if missing := reference.keys() - received - {"lm_head.weight"}:  # tied weights are sent once
                raise DataError(f"{len(missing)} tensors were not sent, the first is {min(missing)}")
        else:
            self._primerl_reference_tensors = tensors
        return {
            "rank": vllm_compat.worker_index(self),
            "version": version,
            "num_parameters": num_parameters,
        }

    def _primerl_open(
        self, source: Any, version: int
    ) -> tuple[dict[str, TensorInfo], Iterator[tuple[str, Any]]]:
        """Open a folder or chain. Returns names and shapes and the stream of tensors. Raises DataError or OSError."""
        from primerl_hpc.inference import vllm_compat

        config = vllm_compat.model_config(self)
        is_tied = bool(getattr(config.hf_config, "tie_word_embeddings", False))
        folder = str(
            Mirror(env.mirror()).update_to(source, version) if isinstance(source, DeltaChain) else source
        )
        reference = self._primerl_reference(config.model)

        def check(tensors: dict[str, TensorInfo]) -> None:
            if reference is not None:
                check_same_model(tensors, reference, is_tied=is_tied, location=folder)

        return open_folder(local_snapshot(folder) or Path(folder), check)

    def _primerl_join(self, assignment: RankAssignment) -> Any:
        """Return the group that receives from the trainer. Raises RoleError if not all members join in time."""
        from primerl_hpc.inference import vllm_compat
        from primerl_hpc.transport.weights.broadcast_group import BroadcastGroup, connect_store

        group = getattr(self, "_primerl_group", None)
        if group is None or group.name != assignment.group:
            self._primerl_group = None  # a group of an earlier incarnation, or with a failed member
            self._primerl_group = group = BroadcastGroup.join(
                connect_store(_keys(), assignment.host, assignment.port),
                assignment.group,
                rank=assignment.first_rank + vllm_compat.worker_index(self),
                size=assignment.size,
                device=vllm_compat.device(self),
            )
        return group

    def _primerl_reference(self, model: str) -> dict[str, TensorInfo] | None:
        """Return names and shapes of the served weights: of the last update, or of the folder that it started with."""
        reference = getattr(self, "_primerl_reference_tensors", None)
        if reference is not None or not (folder := local_snapshot(model)):
            return reference
        try:
            return read_headers(folder)
        except DataError as error:  # for example a base model that is not stored as safetensors
            logger.warning("updates are not compared with the tensors of the served model: %s", error)
            return None


def _keys() -> RunKeys:
    folder = env.run_dir()
    if folder is None:
        raise RoleError("the engine has no keys, because it is not part of a run", location=env.RUN_DIR)
    return run_keys(RunDir(folder))


def _collect_names(tensors: Iterator[tuple[str, Any]], names: set[str]) -> Iterator[tuple[str, Any]]:
    """Pass the tensors through and add their names to ``names``."""
    for name, tensor in tensors:
        names.add(name)
        yield name, tensor


def open_folder(
    folder: Path, check: Callable[[dict[str, TensorInfo]], None]
) -> tuple[dict[str, TensorInfo], Iterator[tuple[str, Any]]]:
    """Return names and shapes and a stream of the tensors of one version, after ``check`` accepted them.

    Raises DataError if the folder is damaged, or was replaced before all files were open: a restarted trainer may write
    a version again under the same name.
    """
    manifest = read_json_or_none(folder / MANIFEST)
    tensors = read_headers(folder)
    check(tensors)
    stream = stream_tensors(tensors)
    if read_json_or_none(folder / MANIFEST) != manifest:
        raise DataError("the folder was replaced while it was opened", location=str(folder))
    return tensors, stream


def stream_tensors(tensors: dict[str, TensorInfo]) -> Iterator[tuple[str, Any]]:
    """Return an iterator over (name, tensor), file by file.

    All files are open when this returns, so renaming or deleting them later has no effect.
    """
    from safetensors import safe_open

    files = sorted({info.file for info in tensors.values()})
    readers = deque(safe_open(file, framework="pt") for file in files)

    def stream() -> Iterator[tuple[str, Any]]:
        while readers:
            with readers.popleft() as reader:
                for name in reader.keys():  # noqa: SIM118 (not a dict)
                    if name in tensors:
                        yield name, reader.get_tensor(name)

    return stream()
