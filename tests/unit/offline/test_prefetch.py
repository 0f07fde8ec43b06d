"""`primerl-hpc prefetch` against a local hub, with the real package huggingface_hub in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.cluster.software_schema import Container
from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError, DataError, ExitCode
from primerl_hpc.offline.prefetch.fetch import HubFile, check_space, choose_files
from primerl_hpc.offline.prefetch.images import look_for_image, pull_image
from primerl_hpc.offline.prefetch.inventory import Presence, look
from primerl_hpc.offline.prefetch.needs import NeedKind, needs_of
from primerl_hpc.plan.container import with_cache
from primerl_hpc.recipe.load import parse_recipe
from primerl_hpc.run.lock import SupervisorLock
from tests.support.helpers import PATIENCE_S, ROOT, safetensors_bytes, wait_for
from tests.support.hub import cache_dataset, cache_model, serve_hub

RECIPE = """\
kind: sft
name: hub
model: {name: org/model, tokenizer: org/tokens, renderer: {name: chatml}}
max_steps: 1
sft: {data: {path: org/rows}}
"""
MODEL = {
    "config.json": b'{"model_type": "qwen3"}',
    "model-00001-of-00002.safetensors": safetensors_bytes("layer1"),
    "model-00002-of-00002.safetensors": safetensors_bytes("layer2"),
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {f"layer{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}}
    ).encode(),
    "pytorch_model.bin": b"copy",
    "original/consolidated.pth": b"copy",
}
FLAT = {name: data for name, data in MODEL.items() if "/" not in name and not name.endswith(".bin")}
MODELS = {"org/model": MODEL, "org/tokens": {"tokenizer.json": b"{}", "model.safetensors": b"unused"}}
LOCAL_ROWS = ("--set", "sft.data.path=rows.jsonl")
ROWS = {"org/rows": {"train.jsonl": b'{"prompt": "a", "completion": "b"}\n'}}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hub.yaml").write_text(RECIPE)
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def start(url: str, *words: str) -> subprocess.Popen[str]:
    """Start ``primerl-hpc prefetch`` with a cache in the current folder."""
    environ = {"HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
    cache = f"cache={Path.cwd()}/cache"
    command = ("prefetch", "hub.yaml", "-p", "local", "--json", "--profile-set", cache, *words)
    return subprocess.Popen(
        [sys.executable, "-m", "primerl_hpc", *command],
        env={
            **os.environ,
            **environ,
            "PYTHONPATH": env.join_pythonpath(str(ROOT), os.environ.get("PYTHONPATH")),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, dict[str, dict[str, object]], str]:
    """Return exit code, items by name, and stderr."""
    out, err = process.communicate(timeout=PATIENCE_S)
    items = json.loads(out)["items"] if out else []
    return process.returncode, {item["name"]: item for item in items}, err


def test_a_second_prefetch_finds_everything_and_asks_the_hub_for_nothing(here: Path) -> None:
    asked: list[str] = []
    with serve_hub(ROWS, models=MODELS, asked=asked) as url:
        code, items, err = end(start(url, "--check"))
        assert code == 66 and not (here / "cache").exists(), err
        assert {item["state"] for item in items.values()} == {"missing"}
        code, items, err = end(start(url))
        assert code == 0, (items, err)
        assert {item["kind"] for item in items.values()} == {"model", "tokenizer", "dataset"}
    assert set(asked) == {*FLAT, "tokenizer.json", "train.jsonl"}  # one format of the weights
    (snapshot,) = (here / "cache" / "hub" / "models--org--model" / "snapshots").iterdir()
    assert {path.name: path.read_bytes() for path in snapshot.iterdir()} == FLAT
    asked.clear()
    # the hub of the first call has ended: neither call needs it
    for words in ((), ("--check",)):
        code, items, err = end(start("http://127.0.0.1:9", *words))
        assert code == 0 and {item["state"] for item in items.values()} == {"complete"}, (items, err)


def test_a_killed_prefetch_keeps_complete_files_and_the_next_one_continues(here: Path) -> None:
    last = "model-00002-of-00002.safetensors"
    asked: list[str] = []
    is_over = threading.Event()

    def hold(path: str, data: bytes) -> bytes:
        if path == last:
            is_over.wait(PATIENCE_S)
        return data

    with serve_hub({}, models=MODELS, asked=asked, send=hold) as url:
        killed = start(url, *LOCAL_ROWS)
        blobs = here / "cache" / "hub" / "models--org--model" / "blobs"
        complete = [name for name in FLAT if name != last]
        present = lambda: [path for path in blobs.glob("*") if path.suffix != ".incomplete"]  # noqa: E731
        wait_for(lambda: last in asked and len(present()) >= len(complete), "the other files")
        os.killpg(killed.pid, signal.SIGKILL)
        killed.communicate()
        is_over.set()
        asked.clear()
        code, items, err = end(start(url, *LOCAL_ROWS))
    assert code == 0 and asked == [last, "tokenizer.json"], (items, err)


def test_wrong_files_are_fetched_again_and_a_model_that_the_hub_lacks_is_named(here: Path) -> None:
    wrong = [True]

    def spoil(path: str, data: bytes) -> bytes:
        if path.startswith("model-00001") and wrong:
            wrong.clear()
            return bytes(len(data))
        return data

    with serve_hub({}, models={"org/model": MODEL}, send=spoil) as url:
        code, items, _ = end(start(url, *LOCAL_ROWS))
        assert code == 66
        assert items["org/tokens"]["detail"] == "the hub has no tokenizer org/tokens, or it is private"
        assert "model-00001-of-00002.safetensors differs from the hub's checksum" in str(
            items["org/model"]["detail"]
        )
        code, items, _ = end(start(url, *LOCAL_ROWS))
        assert code == 66 and items["org/model"]["state"] == "complete"
    (snapshot,) = (here / "cache" / "hub" / "models--org--model" / "snapshots").iterdir()
    name = "model-00001-of-00002.safetensors"
    assert (snapshot / name).read_bytes() == MODEL[name]


def test_two_commands_fetch_each_file_once(here: Path) -> None:
    asked: list[str] = []
    is_held = threading.Event()

    def hold(path: str, data: bytes) -> bytes:
        is_held.wait(PATIENCE_S)
        return data

    with serve_hub({}, models=MODELS, asked=asked, send=hold) as url:
        first = start(url, *LOCAL_ROWS)
        wait_for(lambda: asked, "the first download")
        second = start(url, *LOCAL_ROWS)
        assert second.stderr is not None
        assert "another prefetch" in second.stderr.readline()
        is_held.set()
        results = end(first), end(second)
    assert [code for code, _, _ in results] == [0, 0], results
    assert len(asked) == len(set(asked))


def test_a_disk_without_room_is_reported_before_the_download(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="GiB are missing, but the filesystem has only") as raised:
        check_space(tmp_path, 1 << 60)
    assert "set cache.path of the profile to another folder" in raised.value.hint
    check_space(tmp_path, 1)


NAMES = st.sampled_from(
    "config.json a.safetensors b.safetensors a.bin a.gguf vocab.txt sub/a.safetensors x.onnx".split()
)


@given(st.sets(NAMES), st.booleans())
def test_weights_are_chosen_in_one_format(names: set[str], is_tokenizer: bool) -> None:
    chosen = [
        file.path for file in choose_files([HubFile(name, 1) for name in names], is_tokenizer=is_tokenizer)
    ]
    assert {"config.json", "vocab.txt"} & names <= set(chosen) <= names - {"sub/a.safetensors", "x.onnx"}
    suffixes = {Path(name).suffix for name in chosen} - {".json", ".txt"}
    assert len(suffixes) <= (0 if is_tokenizer else 1)
    if any(name.endswith(".safetensors") and "/" not in name for name in names) and not is_tokenizer:
        assert suffixes == {".safetensors"}


NO_LOCKS = """
import errno, fcntl, os

def refuse_no_locks(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

fcntl.flock = refuse_no_locks
"""


def test_libraries_that_need_locks_report_the_folder_that_has_none(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "sitecustomize.py").write_text(NO_LOCKS)
    monkeypatch.setenv("PYTHONPATH", str(here))
    with serve_hub(ROWS, models=MODELS) as url:
        code, items, err = end(start(url))
    assert code == ExitCode.NOT_FOUND, err
    for name, package in (("org/model", "huggingface_hub"), ("org/rows", "datasets")):
        detail = str(items[name]["detail"])
        assert f"is on a filesystem without file locks, which package {package} needs (No locks" in detail
        assert detail.startswith(f"{here}/cache/") and "cache.path of the profile" in str(items[name]["hint"])


# -- what a run needs, and what is there


def rl_recipe(**changes: object) -> Mapping[str, object]:
    return {
        "kind": "rl",
        "name": "x",
        "model": {"name": "org/model"},
        "max_steps": 1,
        "environments": {"train": [{"id": "reverse-text"}, {"id": "other-env"}]},
        **changes,
    }


def test_an_environment_that_is_used_twice_is_shown_with_its_arguments(here: Path) -> None:
    environments = {"train": [{"id": "other-env"}], "eval": [{"id": "other-env", "args": {"split": "test"}}]}
    recipe = {"kind": "rl", "name": "two", "model": {"name": str(here)}, "max_steps": 1}
    needs = needs_of(
        parse_recipe({**recipe, "environments": environments}), load_profile("local").profile, here
    )
    labels = [need.label for need in needs if need.kind == NeedKind.ENVIRONMENT]
    assert labels == ["other-env", 'other-env {"split": "test"}']


def test_needs_are_everything_that_no_local_file_is(here: Path) -> None:
    profile = load_profile("local", overrides=[f"cache={here}/cache"]).profile
    warmup = {"max_steps": 1, "sft": {"data": [{"path": "org/a"}, {"path": "here.jsonl"}]}}
    recipe = parse_recipe(rl_recipe(warmup=warmup, judge={"model": {"name": "org/judge"}}))
    needs = [(need.kind, need.name) for need in needs_of(recipe, profile, here)]
    assert needs == [
        (NeedKind.MODEL, "org/model"),
        (NeedKind.MODEL, "org/judge"),
        (NeedKind.DATASET, "org/a"),
        (NeedKind.ENVIRONMENT, "reverse-text"),
        (NeedKind.ENVIRONMENT, "other-env"),
    ]
    (here / "org" / "model").mkdir(parents=True)  # now the names are paths
    assert [need.name for need in needs_of(recipe, profile, here)] == ["reverse-text", "other-env"]


def test_the_cache_shows_what_is_complete(here: Path) -> None:
    profile = load_profile("local", overrides=[f"cache={here}/cache"]).profile
    maths = {"id": "math-problems", "args": {"dataset": "org/maths"}}
    environments = {"train": [{"id": "reverse-text"}, {"id": "other-env"}, maths]}
    warmup = {"max_steps": 1, "sft": {"data": {"path": "org/a", "subset": "easy"}}}
    recipe = parse_recipe(rl_recipe(environments=environments, warmup=warmup))
    needs = {need.name: need for need in needs_of(recipe, profile, here)}

    def states() -> list[Presence]:
        return [look(need).state for need in needs.values()]

    unknown = Presence.UNKNOWN
    assert states() == [Presence.MISSING, Presence.MISSING, Presence.COMPLETE, unknown, Presence.MISSING]
    snapshot = cache_model(here / "cache" / "hub", "org/model", FLAT)
    (cache_dataset(here / "cache" / "datasets", "org/a").parent / "easy").mkdir()
    assert states()[:2] == [Presence.COMPLETE, Presence.COMPLETE]
    (snapshot / "model-00002-of-00002.safetensors").write_bytes(b"\2")
    found = look(needs["org/model"])
    assert (
        found.state == Presence.PARTIAL
        and "00002.safetensors: not a complete safetensors file" in found.detail
    )
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    found = look(needs["org/model"])
    assert found.state == Presence.PARTIAL and "shard model-00002-of-00002.safetensors" in found.detail


def test_a_cache_with_an_unset_variable_or_a_relative_path_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHARED", "/shared/me")
    loaded = load_profile("local", overrides=["cache.path=$SHARED/cache"])
    assert loaded.profile.cache_path == "/shared/me/cache" and "/shared/me/cache" in loaded.text
    for value, said in (("$NOT_SET/x", r"\$NOT_SET, which is not set"), ("cache", "not an absolute path")):
        with pytest.raises(ConfigError, match=said):
            load_profile("local", overrides=[f"cache={value}"])


# -- images


def test_an_image_address_becomes_a_file_of_the_cache(tmp_path: Path) -> None:
    (tmp_path / "apptainer").write_text(
        '#!/bin/sh\n[ "$3" = docker://org/bad ] && echo no such tag >&2 && exit 3\n'
        'head -c 5000 /dev/zero > "$2"\n'
    )
    (tmp_path / "apptainer").chmod(0o755)
    command = {"kind": "apptainer", "command": str(tmp_path / "apptainer")}
    container = Container.model_validate({**command, "image": "docker://nvcr.io/nvidia/pytorch:25.10"})
    cache = str(tmp_path / "cache")
    path = f"{cache}/images/docker-nvcr.io-nvidia-pytorch-25.10.sif"
    assert with_cache(container, cache).image == path
    assert with_cache(container, cache).mounts == (f"{cache}:{cache}",)
    assert look_for_image(container, cache).state == Presence.MISSING
    pull_image(container, cache)
    assert look_for_image(container, cache).is_complete
    bad = container.model_copy(update={"image": "docker://org/bad"})
    with pytest.raises(DataError, match=r"cannot fetch docker://org/bad \(exit code 3\): no such tag"):
        pull_image(bad, cache)
    with pytest.raises(ConfigError, match="is not on this machine"):
        pull_image(bad.model_copy(update={"command": "/no/apptainer"}), cache)
    assert [file.name for file in Path(cache, "images").iterdir()] == [
        Path(path).name
    ]  # no temporary file is left
    local = Container.model_validate({"kind": "apptainer", "image": path})
    assert with_cache(local, None) == local and look_for_image(local, None).is_complete


def test_a_stale_lock_of_a_killed_prefetch_does_not_block(here: Path) -> None:
    folder = here / "cache" / "primerl-prefetch"
    folder.mkdir(parents=True)
    lock = SupervisorLock(folder / "lock")
    (folder / "lock").write_text(json.dumps({**lock.identity, "pid": 2**22 + 1}))
    assert end(start("http://127.0.0.1:9", *LOCAL_ROWS))[0] == 66
    assert not (folder / "lock").exists()
