"""Export of a policy version: the copied files match the manifest, and no existing file is overwritten."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from primerl_hpc.common.errors import ConfigError, DataError, ExitCode, NotFoundError, OccupiedError
from primerl_hpc.common.names import Role
from primerl_hpc.export.export import export_model
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.weights.filesystem import MANIFEST, WeightWriter
from tests.support.checksums import verify_checksums
from tests.support.helpers import make_plan, process_plan
from tests.support.tiny_models import make_family
from tests.unit.cli.test_cli import primerl

RECIPE = {
    "kind": "rl",
    "name": "toy",
    "model": {"name": "some/model"},
    "max_steps": 9,
    "environments": {"train": [{"id": "reverse-text"}], "eval": [{"id": "reverse-text"}]},
}


def write_version(run: RunDir, version: int, base: Path) -> None:
    writer = WeightWriter(run, version)
    writer.begin()
    shard = writer.shard_path(1, of=1)
    shard.write_bytes(f"weights {version}".encode() * 1000)
    entries = [writer.finish_file(shard), *writer.copy_model_files(base, dtype="float32")]
    entries.append(writer.write_index({"w": shard.name}, total_bytes=shard.stat().st_size))
    writer.commit(entries)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (base / name).write_text("{}")
    (base / "chat_template.jinja").write_text("{{ messages }}")
    made = RunDir(tmp_path / "run")
    make_plan(made.root, RECIPE, processes=[process_plan(Role.TRAINER)])
    for version in (3, 6):
        write_version(made, version, base)
    return made


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".tmp")]


def test_the_last_version_is_exported_completely_and_the_manifest_matches(
    run: RunDir, tmp_path: Path
) -> None:
    done = export_model(run, tmp_path / "out" / "model")
    assert done.step == 6
    names = {path.name for path in done.folder.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert {MANIFEST, "model.safetensors.index.json", "model-00001-of-00001.safetensors"} <= names
    assert "STABLE" not in names
    verify_checksums(done.folder)
    assert not run.has_lease(run.weights_step(6)) and not leftovers(tmp_path / "out")


def test_a_requested_version_can_be_hard_linked_and_remains_after_the_run(
    run: RunDir, tmp_path: Path
) -> None:
    done = export_model(run, tmp_path / "model", step=3, link=True)
    shard = "model-00001-of-00001.safetensors"
    assert os.path.samefile(done.folder / shard, run.weights_step(3) / shard)
    run.delete_step(run.weights_step(3), "STABLE")
    verify_checksums(done.folder)


def test_an_export_overwrites_nothing_and_may_use_an_empty_folder(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_text("text")
    (tmp_path / "file").write_text("text")
    for name in ("mine", "file"):
        with pytest.raises(OccupiedError, match="does not overwrite anything"):
            export_model(run, tmp_path / name)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["precious"]
    (tmp_path / "empty").mkdir()
    assert export_model(run, tmp_path / "empty").num_files == 6


def test_a_changed_byte_is_detected_and_leaves_no_files(run: RunDir, tmp_path: Path) -> None:
    shard = run.weights_step(6) / "model-00001-of-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[5] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match="CRC-32"):
        export_model(run, tmp_path / "model")
    assert not (tmp_path / "model").exists() and not leftovers(tmp_path)
    assert not run.has_lease(run.weights_step(6))


def test_the_error_for_a_step_without_weights_lists_the_existing_steps(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no weights of step 4") as error:
        export_model(run, tmp_path / "model", step=4)
    assert "3, 6" in error.value.hint
    run.finish_checkpoint_side(4, "trainer", ("trainer",))
    with pytest.raises(NotFoundError, match="has a trainer checkpoint, but its weights were deleted"):
        export_model(run, tmp_path / "model", step=4)


def test_a_run_without_weights_or_without_training_is_refused(tmp_path: Path) -> None:
    young = RunDir(tmp_path / "young")
    make_plan(young.root, RECIPE, processes=[process_plan(Role.TRAINER)])
    with pytest.raises(NotFoundError, match="no complete policy version yet"):
        export_model(young, tmp_path / "model")
    judged = RunDir(tmp_path / "judged")
    recipe = {**RECIPE, "kind": "eval", "max_steps": None}
    make_plan(judged.root, recipe, processes=[process_plan(Role.EVALUATOR)])
    with pytest.raises(ConfigError, match="trains no weights"):
        export_model(judged, tmp_path / "model")


def test_the_command_prints_one_document_or_one_sentence(run: RunDir, tmp_path: Path) -> None:
    done = primerl("export", "run", "--to", "out", "--json", cwd=tmp_path, PRIMERL_RUNS_DIR=str(tmp_path))
    said = json.loads(done.stdout)
    assert (said["step"], said["files"], said["folder"]) == (6, 6, str(tmp_path / "out"))
    again = primerl("export", str(run.root), "--to", "out", cwd=tmp_path)
    assert again.returncode == ExitCode.OCCUPIED and again.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("family", "prefix"),
    [
        ("glm4_moe", "model.layers.2."),
        ("qwen3_next", "mtp.layers.0."),
        ("llama", "model.vision_tower.layers.0."),
    ],
)
def test_tensors_that_were_not_trained_are_copied_unchanged(tmp_path: Path, family: str, prefix: str) -> None:
    """The trained tensors in the trained type, and layers for prediction, or of a tower, in bfloat16."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    base = make_family(family, tmp_path / "base")
    trained = load_file(base / "model.safetensors")
    extra = {
        name.replace("model.layers.1.", prefix): value.bfloat16()
        for name, value in trained.items()
        if name.startswith("model.layers.1.")
    }
    save_file(trained | extra, base / "model.safetensors", metadata={"format": "pt"})
    run = RunDir(tmp_path / "run")
    make_plan(run.root, RECIPE | {"model": {"name": str(base)}}, processes=[process_plan(Role.TRAINER)])
    writer = WeightWriter(run, 1)
    writer.begin()
    shard = writer.shard_path(1, of=1)
    changed = {name: value + 1 for name, value in trained.items()}
    save_file(changed, shard, metadata={"format": "pt"})
    entries = [writer.finish_file(shard), *writer.copy_model_files(base, dtype="float32")]
    entries.append(writer.write_index(dict.fromkeys(trained, shard.name), total_bytes=1000))
    writer.commit(entries)

    done = export_model(run, tmp_path / "model", link=True)
    assert done.num_copied == len(extra) > 5
    verify_checksums(done.folder)
    index = json.loads((done.folder / "model.safetensors.index.json").read_text())
    found = {name: load_file(done.folder / file)[name] for name, file in index["weight_map"].items()}
    assert set(found) == set(trained | extra)
    assert all(torch.equal(found[name], value) for name, value in (changed | extra).items())
    assert index["metadata"]["total_size"] == 1000 + sum(value.nbytes for value in extra.values())
    verify_checksums(run.weights_step(1))  # hard links of the export do not change the version
