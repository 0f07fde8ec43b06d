"""An adapter merged into its base model: adapters that do not fit are refused, and all other files stay unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from primerl_hpc.common.errors import ConfigError, DataError, ExitCode  # noqa: E402
from primerl_hpc.common.names import Role  # noqa: E402
from primerl_hpc.export.export import export_model  # noqa: E402
from primerl_hpc.run.rundir import RunDir  # noqa: E402
from primerl_hpc.transport.weights.filesystem import (  # noqa: E402
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    WeightWriter,
)
from tests.support.checksums import verify_checksums  # noqa: E402
from tests.support.helpers import make_plan, process_plan  # noqa: E402
from tests.unit.cli.test_cli import primerl  # noqa: E402
from tests.unit.export.test_export import RECIPE, leftovers, write_version  # noqa: E402

A, B = torch.randn(2, 6), torch.randn(4, 2)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Two files and an index, in two types."""
    folder = tmp_path / "base"
    folder.mkdir()
    files = {"model-1.safetensors": {"q.weight": torch.randn(4, 6), "norm.weight": torch.randn(6)}}
    files["model-2.safetensors"] = {"p.weight": torch.randn(4, 6).bfloat16()}
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    index = {"weight_map": {key: name for name, tensors in files.items() for key in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return folder


@pytest.fixture
def run(tmp_path: Path, base: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    make_plan(made.root, RECIPE | {"lora": {}}, processes=[process_plan(Role.TRAINER)], model_path=base)
    return made


def write_adapter(run: RunDir, *modules: str, b=B) -> None:
    writer = WeightWriter(run, 3)
    writer.begin()
    tensors = {f"base_model.model.{each}.lora_A.weight": A.clone() for each in modules}
    tensors |= {f"base_model.model.{each}.lora_B.weight": b.clone() for each in modules}
    save_file(tensors, writer.temporary / ADAPTER_WEIGHTS)
    (writer.temporary / ADAPTER_CONFIG).write_text('{"r": 2, "lora_alpha": 3.0}')
    names = (ADAPTER_WEIGHTS, ADAPTER_CONFIG)
    writer.commit([writer.finish_file(writer.temporary / name) for name in names])


def test_a_merge_adds_the_scaled_product_and_keeps_everything_else(
    run: RunDir, base: Path, tmp_path: Path
) -> None:
    write_adapter(run, "q", "p")
    done = export_model(run, tmp_path / "model", merge=True)
    verify_checksums(done.folder)
    assert done.num_files == 4 and {path.name for path in base.iterdir()} < {
        path.name for path in done.folder.iterdir()
    }
    for name in ("model-1.safetensors", "model-2.safetensors"):
        before, after = load_file(base / name), load_file(done.folder / name)
        for key, value in before.items():
            product = 1.5 * B @ A if key != "norm.weight" else 0.0
            assert after[key].dtype == value.dtype
            torch.testing.assert_close(after[key], (value.float() + product).to(value.dtype))
    assert not leftovers(tmp_path)


def test_an_adapter_is_exported_unchanged(run: RunDir, tmp_path: Path) -> None:
    write_adapter(run, "q")
    done = export_model(run, tmp_path / "adapter")
    assert {path.name for path in done.folder.iterdir()} == {ADAPTER_WEIGHTS, ADAPTER_CONFIG, "manifest.json"}


def test_an_adapter_of_another_model_is_refused_and_leaves_no_files(run: RunDir, tmp_path: Path) -> None:
    write_adapter(run, "q", "z")
    with pytest.raises(DataError, match=r"tensors that the base model does not have, e\.g\. z\.weight"):
        export_model(run, tmp_path / "model", merge=True)
    write_adapter(run, "q", b=torch.randn(5, 2))
    with pytest.raises(DataError, match=r"shape \[4, 6\], but its adapter's product has \[5, 6\]"):
        export_model(run, tmp_path / "model", merge=True)
    assert not (tmp_path / "model").exists()
    assert not [path for path in tmp_path.iterdir() if ".tmp" in path.name]


def test_a_full_model_cannot_be_merged(run: RunDir, base: Path, tmp_path: Path) -> None:
    write_version(run, 3, base)
    with pytest.raises(ConfigError, match="--merge is only for runs that train adapters"):
        export_model(run, tmp_path / "model", merge=True)
    done = primerl("export", str(run.root), "--to", "out", "--merge", cwd=tmp_path)
    assert done.returncode == ExitCode.CONFIG and done.stderr.count("\n") == 1
