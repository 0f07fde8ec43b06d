"""``primerl-hpc convert``: what it writes and refuses. tests/unit/trainer/test_load.py compares the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from click.testing import CliRunner, Result  # noqa: E402
from safetensors import safe_open  # noqa: E402

from primerl_hpc.checks.recipe.model_config import load_config, refuse_untrainable  # noqa: E402
from primerl_hpc.cli.main import cli  # noqa: E402
from primerl_hpc.common.errors import ConfigError, ExitCode, NotFoundError, OccupiedError  # noqa: E402
from primerl_hpc.common.model_files import INDEX  # noqa: E402
from primerl_hpc.export.convert import convert_model  # noqa: E402
from tests.support.helpers import small_rl, small_sft  # noqa: E402
from tests.support.quantized_models import store_fp8  # noqa: E402
from tests.support.tiny_models import make_family  # noqa: E402


class Usage(NamedTuple):
    free: int


def convert(model: Path, to: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["convert", str(model), "--to", str(to), *words], standalone_mode=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = make_family("qwen3", tmp_path / "model")
    store_fp8(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_the_folder_is_a_bfloat16_model_with_all_other_files(model: Path, tmp_path: Path) -> None:
    to = tmp_path / "plain"
    done = convert(model, to, "--json")
    assert done.exit_code == ExitCode.DONE
    told = json.loads(done.stdout)
    weight_map = json.loads((to / INDEX).read_text())["weight_map"]
    assert told["quantization"] == "fp8" and told["tensors"] == len(weight_map) and "100 %" in done.stderr
    types = {}
    for name in set(weight_map.values()):
        with safe_open(to / name, framework="pt") as file:
            types |= {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    assert types.keys() == weight_map.keys() and not any(key.endswith("_scale_inv") for key in types)
    assert types["model.layers.0.mlp.up_proj.weight"] == "BF16"
    assert types["model.norm.weight"] == "F32"  # was not quantized: unchanged
    config = json.loads((to / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    assert (to / "tokenizer.json").read_text() == "{}"
    assert not list(tmp_path.glob(".plain*"))


def test_an_existing_folder_and_a_model_without_quantization_are_refused(model: Path, tmp_path: Path) -> None:
    assert isinstance(convert(model, model).exception, OccupiedError)
    plain = make_family("qwen3", tmp_path / "plain")
    refused = convert(plain, tmp_path / "new").exception
    assert "is not quantized, so there is nothing to convert" in str(refused)
    absent = convert(tmp_path / "none", tmp_path / "new").exception
    assert isinstance(absent, NotFoundError) and f"model folder {tmp_path / 'none'} does not exist" in str(
        absent
    )
    assert not (tmp_path / "new").exists()


def test_a_full_disk_is_refused_before_it_is_full(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free=1000))
    with pytest.raises(ConfigError, match=r"need .* GiB, and 0.0 GiB are free"):
        convert_model(str(model), tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_an_interrupted_conversion_leaves_nothing(model: Path, tmp_path: Path) -> None:
    def interrupt(num_bytes: int, total: int) -> None:
        assert 0 < num_bytes <= total
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_model(str(model), tmp_path / "new", on_progress=interrupt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_only_runs_without_engines_train_a_quantized_model_directly(model: Path) -> None:
    refuse_untrainable(small_sft(model), load_config(str(model)))
    with pytest.raises(ConfigError, match=r"quantized \(fp8\), so its engines .* primerl-hpc convert "):
        refuse_untrainable(small_rl(model), load_config(str(model)))
    config = json.loads((model / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "awq"}
    }
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="is quantized by awq"):
        refuse_untrainable(small_sft(model), load_config(str(model)))
