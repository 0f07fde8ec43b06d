"""What vLLM mixes into its workers (``--worker-extension-cls``): loading a policy version in place.

Called on every rank by ``collective_rpc("primerl_update_weights", args=(body,))``, with what the orchestrator posted
(`transport.weights`). Each rank checks the
whole folder first, so a bad one is an answer and not the end of the engine; then it streams the tensors, because a
rank keeps only its slices and a node's memory may not hold one full copy per rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.errors import DataError, RoleError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.inference.checkpoint import TensorInfo, check_same_model, read_headers
from primerl_hpc.inference.mirror import Mirror
from primerl_hpc.transport.weights import Chain, Seats, from_body
from primerl_hpc.transport.weights_filesystem import MANIFEST


class WeightUpdate:
    """Methods and attributes carry our prefix: vLLM refuses an extension that shadows a worker's own."""

    def primerl_update_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        """Load HF weights in place: of a folder, of a hub id that lies in the cache, of a chain, or from the trainer.

        Returns ``{"rank", "version"}``; ``{"rank", "error"}`` when they were refused and the old weights still
        serve. Raises when the load itself fails: the model is then incomplete and the engine must end.
        """
        from primerl_hpc.inference import vllm_compat

        rank = int(getattr(self, "rank", 0))
        source, version = from_body(body)
        if isinstance(source, Seats):
            return self._primerl_receive(source, version)
        config = vllm_compat.model_config(self)
        is_tied = bool(getattr(config.hf_config, "tie_word_embeddings", False))
        try:
            folder = str(
                Mirror(env.mirror()).bring_to(source, version) if isinstance(source, Chain) else source
            )
            reference = self._primerl_reference(config.model)

            def check(tensors: dict[str, TensorInfo]) -> None:
                if reference is not None:
                    check_same_model(tensors, reference, is_tied=is_tied, place=folder)

            tensors, stream = open_folder(_local_folder(folder) or Path(folder), check)
        except (DataError, OSError) as error:
            return {"rank": rank, "error": str(error)}
        vllm_compat.reload_weights(self, stream)
        self._primerl_reference_tensors = tensors
        return {"rank": rank, "version": version}

    def _primerl_receive(self, seats: Seats, version: int) -> dict[str, Any]:
        """Load what the trainer sends. Who did not meet it in time has touched nothing."""
        from primerl_hpc.inference import vllm_compat
        from primerl_hpc.transport.broadcast_group import Group, connect_store

        rank = int(getattr(self, "rank", 0))
        group = getattr(self, "_primerl_group", None)
        if group is None or group.name != seats.group:
            self._primerl_group = None  # of another life, or with somebody who is gone
            try:
                group = Group.join(
                    connect_store(seats.host, seats.port),
                    seats.group,
                    rank=seats.first_rank + vllm_compat.worker_index(self),
                    size=seats.size,
                    device=vllm_compat.device(self),
                )
            except RoleError as error:
                return {"rank": rank, "error": str(error)}
            self._primerl_group = group
        received: set[str] = set()
        vllm_compat.reload_weights(self, _noting(group.receive(), received))
        reference = self._primerl_reference(vllm_compat.model_config(self).model) or {}
        if missing := reference.keys() - received - {"lm_head.weight"}:  # tied ones are sent once
            raise DataError(f"{len(missing)} tensors were not sent, the first is {min(missing)}")
        return {"rank": rank, "version": version}

    def _primerl_reference(self, model: str) -> dict[str, TensorInfo] | None:
        """Names and shapes of what the engine serves: the last load's, else those of the folder it started with."""
        reference = getattr(self, "_primerl_reference_tensors", None)
        if reference is not None or not (folder := _local_folder(model)):
            return reference
        try:
            return read_headers(folder)
        except DataError:  # e.g. a base model in another format than safetensors
            return None


def _noting(tensors: Iterator[tuple[str, Any]], names: set[str]) -> Iterator[tuple[str, Any]]:
    for name, tensor in tensors:
        names.add(name)
        yield name, tensor


def open_folder(
    folder: Path, check: Callable[[dict[str, TensorInfo]], None]
) -> tuple[dict[str, TensorInfo], Iterator[tuple[str, Any]]]:
    """Names and shapes, once ``check`` has let them pass, and a stream of the tensors, of one and the same version.

    A recovered trainer writes a version again under the same name, whoever reads it.
    Raises DataError when the folder is damaged, or was replaced before its files were open.
    """
    manifest = read_json_or_none(folder / MANIFEST)
    tensors = read_headers(folder)
    check(tensors)
    stream = stream_tensors(tensors)
    if read_json_or_none(folder / MANIFEST) != manifest:
        raise DataError("was replaced while it was opened", place=str(folder))
    return tensors, stream


def stream_tensors(tensors: dict[str, TensorInfo]) -> Iterator[tuple[str, Any]]:
    """(name, tensor) file by file. All files are open when this returns: who renames or deletes them changes nothing."""
    from safetensors import safe_open

    readers = deque(
        safe_open(file, framework="pt") for file in sorted({each.file for each in tensors.values()})
    )

    def stream() -> Iterator[tuple[str, Any]]:
        while readers:
            with readers.popleft() as reader:
                for name in reader.keys():  # noqa: SIM118 (not a dict)
                    yield name, reader.get_tensor(name)

    return stream()


def _local_folder(model: str) -> Path | None:
    """Where a folder or hub id lies on this machine; None when it does not."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):  # the second: a path, and nothing is there
        return None
