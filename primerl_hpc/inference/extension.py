"""What vLLM mixes into its workers (``--worker-extension-cls``): loading a policy version in place.

Called on every rank by ``collective_rpc("primerl_update_weights", args=(body,))``, with what the orchestrator posted
(`transport.weights`). Each rank checks the
whole folder first, so a bad one is an answer and not the end of the engine; then it streams the tensors, because a
rank keeps only its slices and a node's memory may not hold one full copy per rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.errors import DataError
from primerl_hpc.inference.checkpoint import TensorInfo, check_same_model, read_headers
from primerl_hpc.inference.mirror import Mirror
from primerl_hpc.transport.weights import Chain, from_body


class WeightUpdate:
    """Methods and attributes carry our prefix: vLLM refuses an extension that shadows a worker's own."""

    def primerl_update_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        """Load HF weights in place: of a folder, of a hub id that lies in the cache, or of a chain's last link.

        Returns ``{"rank", "version"}``; ``{"rank", "error"}`` when they were refused and the old weights still
        serve. Raises when the load itself fails: the model is then incomplete and the engine must end.
        """
        from primerl_hpc.inference import vllm_compat

        rank = int(getattr(self, "rank", 0))
        source, version = from_body(body)
        config = vllm_compat.model_config(self)
        is_tied = bool(getattr(config.hf_config, "tie_word_embeddings", False))
        try:
            folder = str(
                Mirror(env.mirror()).bring_to(source, version) if isinstance(source, Chain) else source
            )
            tensors = read_headers(_local_folder(folder) or Path(folder))
            reference = self._primerl_reference(config.model)
            if reference is not None:
                check_same_model(tensors, reference, is_tied=is_tied, place=folder)
        except (DataError, OSError) as error:
            return {"rank": rank, "error": str(error)}
        vllm_compat.reload_weights(self, stream_tensors(tensors))
        self._primerl_reference_tensors = tensors
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


def stream_tensors(tensors: dict[str, TensorInfo]) -> Iterator[tuple[str, Any]]:
    """(name, tensor) file by file."""
    from safetensors import safe_open

    for file in sorted({info.file for info in tensors.values()}):
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 (not a dict)
                yield name, reader.get_tensor(name)


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
