"""``python -m tests.support.vllm_adapter BASE ADAPTER ...``: check that vLLM finds a module for every tensor of
adapters.

Builds vLLM's own model of each base folder, and reads the adapter with vLLM's own reader, which refuses tensors that it
does not expect. Prints one JSON object per pair. vLLM on CPUs has no kernel for adapters of experts, so nothing is
computed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any


def read(base: str, adapter: str) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.utils import get_supported_lora_modules, process_packed_modules_mapping
    from vllm.model_executor.model_loader.utils import initialize_model

    config = EngineArgs(
        model=base, enable_lora=True, skip_tokenizer_init=True, dtype="float32", max_model_len=64
    ).create_engine_config()
    with set_current_vllm_config(config):
        join_group()
        model = initialize_model(config)
    packed = process_packed_modules_mapping(model)
    expected = {"experts"}
    for name in get_supported_lora_modules(model):
        expected |= set(packed.get(name, [name]))
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    loaded = LoRAModel.from_local_checkpoint(
        adapter,
        expected,
        PEFTHelper.from_local_dir(adapter, 64),
        lora_model_id=1,
        device="cpu",
        weights_mapper=mapper and mapper.get_rename_mapper(),
    )
    modules = {name for name, _ in model.named_modules()}
    parts = [(whole, part) for whole, names in packed.items() for part in names]

    def is_known(name: str) -> bool:
        """Return the name of a module, or of a part of one that vLLM packs from several."""
        return name in modules or any(
            name.endswith(f".{part}") and f"{name.removesuffix(part)}{whole}" in modules
            for whole, part in parts
        )

    return {
        "names": len(loaded.loras),
        "unknown": sorted(name for name in loaded.loras if not is_known(name)),
        "incomplete": sorted(
            name for name, each in loaded.loras.items() if each.lora_a is None or each.lora_b is None
        ),
        "scales": sorted({each.scaling for each in loaded.loras.values()}),
    }


def join_group() -> None:
    """Initialize the ranks that layers of vLLM read when they are constructed. Call once per process."""
    import torch.distributed as dist
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    if not dist.is_initialized():
        store = tempfile.mkdtemp()
        init_distributed_environment(1, 0, f"file://{store}/store", 0, "gloo")
        initialize_model_parallel(1, 1)


if __name__ == "__main__":
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    for pair in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        print(json.dumps(read(*pair)), flush=True)
