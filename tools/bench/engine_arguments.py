#!/usr/bin/env python3
"""Parse the engine arguments of all recipes and GPU profiles with the GPU distribution of vLLM, on a synthetic GPU.

    python=$(tools/install-vllm-gpu)/bin/python
    $python tools/bench/engine_arguments.py                    # every command line; exit code 1 if vLLM refuses one
    $python tools/bench/engine_arguments.py --record           # write the two files in docs/measurements

vLLM's parser reads each command line, and ``create_engine_config`` accepts it for an H100 or a B200 (``--gpu``). For a
model whose config.json is not shipped with the planner, only the parser runs. The recorded schema holds the options
that vLLM's parser has; the ordinary tests compare recipes with it, without vLLM's GPU distribution.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import sys
import tempfile
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import ROOT, conclude

sys.path.insert(0, str(ROOT))
SCHEMA = ROOT / "docs" / "measurements" / "vllm_arguments.json"
RESULT = ROOT / "docs" / "measurements" / "engine_arguments.json"
GPUS = {"H100": ((9, 0), 80 << 30), "B200": ((10, 0), 180 << 30)}


def with_driver_library() -> None:
    """Start this process again with the stand-in for libcuda that tools/install-vllm-gpu made, if there is one."""
    folder = Path(sys.prefix) / "no-driver"
    found = os.environ.get("LD_LIBRARY_PATH", "")
    if folder.is_dir() and str(folder) not in found.split(":"):
        os.environ["LD_LIBRARY_PATH"] = f"{folder}:{found}" if found else str(folder)
        os.execv(sys.executable, [sys.executable, *sys.argv])


def make_gpu(name: str) -> None:
    """Let torch and vLLM find 8 GPUs of this type."""
    capability, memory = GPUS[name]
    title = f"NVIDIA {name}"
    import torch

    properties = SimpleNamespace(
        total_memory=memory, multi_processor_count=132, major=capability[0], minor=capability[1], name=title
    )
    for attribute, value in (
        ("is_available", True),
        ("device_count", 8),
        ("get_device_capability", capability),
        ("get_device_name", title),
        ("get_device_properties", properties),
    ):
        setattr(torch.cuda, attribute, lambda *_, value=value, **__: value)
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class SyntheticPlatform(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return title

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return memory

        @classmethod
        def is_fully_connected(cls, physical_device_ids: Any) -> bool:
            return True

        @classmethod
        def device_count(cls) -> int:
            return 8

    vllm.platforms._current_platform = SyntheticPlatform()


def parser_schema() -> dict[str, Any]:
    """Return vLLM's version and its options.

    ``values``: 0 without a value, 1 with one, else ``*``, ``+`` or ``?``. ``type``: int, float, json or text,
    as the parser accepts it. ``choices``: accepted values, if they are listed.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    options: dict[str, Any] = {}
    for action in make_arg_parser(FlexibleArgumentParser())._actions:
        kind: dict[str, Any] = {"values": 1 if action.nargs is None else action.nargs}
        if kind["values"] != 0:
            kind["type"] = accepted_type(action.type)
        if action.choices is not None:
            kind["choices"] = sorted(map(str, action.choices))
        options |= {name: kind for name in action.option_strings if name.startswith("--")}
    return {"vllm": version("vllm"), "options": dict(sorted(options.items()))}


def accepted_type(convert: Any) -> str:
    """Return the first of text, json, float and int of which the parser's function accepts an example, or json."""
    for kind, example in (("text", "x-y"), ("json", "{}"), ("float", "1.5"), ("int", "2")):
        try:
            if convert is not None:
                convert(example)
        except (TypeError, ValueError, argparse.ArgumentTypeError):
            continue
        return kind
    return "json"  # with required fields


def model_folder(name: str, folder: Path) -> str | None:
    """Write the planner's config.json of a model into a folder; None if it has none."""
    known = resources.files("primerl_hpc.plan.predict") / "known_models" / f"{name.replace('/', '--')}.json"
    if not known.is_file():
        return None
    path = folder / name.replace("/", "--")
    path.mkdir(exist_ok=True)
    config = {key: value for key, value in json.loads(known.read_text()).items() if key != "source"}
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def configure(arguments: list[str], folder: Path) -> str:
    """Return "configured", "parsed" for an unknown model, or why vLLM refuses the arguments."""
    from primerl_hpc.inference.vllm_compat import parse_serve_args

    name = arguments[arguments.index("--served-model-name") + 1]
    model = model_folder(name, folder)
    if model is not None:
        for option in ("--model", "--tokenizer"):
            arguments[arguments.index(option) + 1] = model
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            args = parse_serve_args(arguments)
    except (SystemExit, ValueError) as error:
        return (printed.getvalue().splitlines() or [str(error)])[-1]
    if model is None:
        return "parsed"
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    is_headless = "--headless" in arguments
    if is_headless:
        args.api_server_count = 0
    try:
        AsyncEngineArgs.from_cli_args(args).create_engine_config(
            usage_context=UsageContext.OPENAI_API_SERVER, headless=is_headless
        )
    except Exception as error:  # noqa: BLE001 whatever vLLM raises is the answer
        return " ".join(str(error).split())[:300]
    return "configured"


def record(gpu: str, rows: list[dict[str, Any]], profiles: list[str]) -> None:
    head = {
        "command": "tools/bench/engine_arguments.py --record",
        "vllm": version("vllm"),
        "gpu": gpu,
        "profiles": profiles,
    }
    lines = ",\n".join(json.dumps(row) for row in rows)
    RESULT.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n')
    write_schema()


def write_schema() -> None:
    schema = parser_schema()
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(kind)}" for name, kind in schema["options"].items())
    SCHEMA.write_text(f'{{"vllm": {json.dumps(schema["vllm"])}, "options": {{\n{lines}\n}}}}\n')


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", choices=sorted(GPUS), default="H100")
    parser.add_argument("--profile", action="append", help="may be repeated [default: all with GPUs]")
    parser.add_argument("--record", action="store_true", help="write both files; requires all profiles")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.record and options.profile:
        parser.error("--record requires all profiles; omit --profile")
    with_driver_library()
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    make_gpu(options.gpu)
    from tests.support.engine_commands import engine_commands, gpu_profiles

    profiles = options.profile or gpu_profiles()
    rows, wrong = [], []
    with tempfile.TemporaryDirectory() as folder:
        for command in engine_commands(profiles):
            result = configure(list(command.arguments), Path(folder))
            engine = f"{command.recipe} on {command.profile}, {command.where}"
            arguments = shlex.join(command.arguments).replace(f"{ROOT}/", "")
            rows.append(
                {
                    "engine": engine,
                    "recipe": command.recipe,
                    "role": command.role.value,
                    "arguments": arguments,
                    "result": result,
                }
            )
            if result not in ("configured", "parsed"):
                wrong.append(f"{engine}: {result}")
    if options.record:
        record(options.gpu, rows, profiles)
    shown = [{"engine": row["engine"], "result": row["result"]} for row in rows]
    return conclude(f"Engine arguments on {options.gpu}", shown, wrong, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
