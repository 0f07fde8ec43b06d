"""A real engine behind the real router: tokens and log-probabilities, new weights in flight, keys, restarts."""

from __future__ import annotations

import asyncio
import json
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from primerl_hpc.common.rundir import RunDir, ensure_api_key
from primerl_hpc.orchestrator.fleet import Fleet
from primerl_hpc.recipe.schema import Recipe
from primerl_hpc.roles.scratch import scratch_path
from primerl_hpc.trainer.core import Core, build_core
from primerl_hpc.trainer.export import publish_policy
from primerl_hpc.trainer.parallel.mesh import World
from primerl_hpc.trainer.watchdog import Watchdog
from primerl_hpc.transport.delta_codec import encode
from primerl_hpc.transport.weights import Source
from primerl_hpc.transport.weights_delta import DeltaWeightReader, LinkWriter
from primerl_hpc.transport.weights_filesystem import WeightWriter
from tests.e2e.serving import Serving, hf_logprobs, save_variant
from tests.e2e.test_trainer import rl_recipe
from tests.support import random_row

pytestmark = pytest.mark.e2e

PROMPT = [1, 5, 103, 40, 41, 42, 2]
TOLERANCE = 1e-4  # both sides compute in float32


@pytest.fixture(scope="module")
def variant(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_variant(serving.model, tmp_path_factory.mktemp("variant") / "model", seed=7)


@pytest.fixture
def base(serving: Serving):
    """Afterwards the engine serves version 0 again."""
    yield
    asyncio.run(with_fleet(serving, lambda fleet: fleet.update(serving.model, 0)))


async def with_fleet(serving: Serving, action):
    fleet = Fleet(serving.run, ensure_api_key(serving.run), backoff_s=0.05)
    try:
        return await action(fleet)
    finally:
        await fleet.close()


def update(serving: Serving, source: Source, version: int):
    return asyncio.run(with_fleet(serving, lambda fleet: fleet.update(source, version)))


@contextmanager
def small_trainer(model: Path, world: World, folder: Path) -> Iterator[Core]:
    recipe = Recipe.model_validate(rl_recipe(model, optimizer={"type": "adamw", "lr": 1e-2}))
    watchdog = Watchdog(RunDir(folder), "trainer-0", rank=0, size=1, timeout_s=600)
    try:
        yield build_core(recipe, str(model), world, watchdog)
    finally:
        watchdog.rest()  # it would end the process of all tests


def is_of(model: Path, generated: dict) -> bool:
    expected = hf_logprobs(model, PROMPT, generated["token_ids"])
    return generated["logprobs"] == pytest.approx(expected, abs=TOLERANCE)


def test_generation_through_the_router_has_the_logprobs_of_transformers(serving: Serving) -> None:
    generated = serving.generate(PROMPT)
    assert len(generated["token_ids"]) == 16
    assert is_of(serving.model, generated)


def test_more_seeded_prompts_at_once_than_a_batch_holds_are_all_answered(serving: Serving) -> None:
    prompts = [
        [first, *range(5, 95)] * 5 for first in range(1, 13)
    ]  # 12 × 455 tokens; a batch of the engine has 2,048
    alone = serving.generate(prompts[-1], 4)
    with ThreadPoolExecutor(len(prompts)) as pool:
        generated = list(pool.map(lambda prompt: serving.generate(prompt, 4), prompts))
    assert [len(each["token_ids"]) for each in generated] == [4] * len(prompts)
    assert generated[-1]["token_ids"] == alone["token_ids"]


def test_the_router_serves_models_and_chat(serving: Serving) -> None:
    url = serving.url("router-0")
    models = httpx.get(f"{url}/v1/models", headers=serving.headers, trust_env=False).json()
    assert [model["id"] for model in models["data"]] == [serving.recipe.model.name]
    body = {
        "model": serving.recipe.model.name,
        "messages": [{"role": "user", "content": "abc"}],
        "max_tokens": 4,
        "ignore_eos": True,  # a model of random weights may end its turn at any token
    }
    answer = serving.post("router-0", "/v1/chat/completions", body)
    assert answer.json()["usage"]["completion_tokens"] == 4


def test_nothing_but_health_and_metrics_answers_without_the_key(serving: Serving) -> None:
    engine, router = serving.url("inference-0"), serving.url("router-0")
    generate = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
    with httpx.Client(trust_env=False) as client:
        for url in (engine, router):
            assert client.get(f"{url}/v1/models").status_code == 401
            assert client.post(f"{url}/inference/v1/generate", json=generate).status_code == 401
            for route in ("/pause", "/resume", "/update_weights", "/reload_weights"):
                assert client.post(f"{url}{route}", json={}).status_code == 401
        for route in ("/primerl/state", "/version", "/load", "/docs", "/openapi.json"):
            assert client.get(f"{engine}{route}").status_code == 401, route
        for route in ("/tokenize", "/invocations", "/collective_rpc", "/scale_elastic_ep"):
            assert client.post(f"{engine}{route}", json={}).status_code == 401, route
        assert client.get(f"{engine}/health").status_code == 200
        assert client.get(f"{engine}/metrics").status_code == 200


def test_admin_calls_do_not_pass_the_router(serving: Serving) -> None:
    assert serving.post("router-0", "/pause", {}).status_code != 200
    state = httpx.get(f"{serving.url('inference-0')}/primerl/state", headers=serving.headers, trust_env=False)
    assert state.json()["paused"] is False


def test_the_key_is_in_no_command_line_and_no_log(serving: Serving) -> None:
    key = ensure_api_key(serving.run)
    for name in serving.processes:
        assert key not in serving.log(name)
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert key.encode() not in cmdline.read_bytes()
        except OSError:  # ended meanwhile
            continue


def test_an_update_serves_the_new_weights_and_a_reload_brings_the_base_model_back(
    serving: Serving, variant: Path, base: None
) -> None:
    report = update(serving, variant, 3)
    assert report.is_served and not report.failed, report
    assert asyncio.run(with_fleet(serving, Fleet.versions)) == {"inference-0": 3}
    generated = serving.generate(PROMPT)
    assert is_of(variant, generated)
    assert not is_of(serving.model, generated)
    answer = serving.post("inference-0", "/reload_weights", {})
    assert answer.json() == {"version": 0}
    assert answer.headers["x-primerl-policy-version"] == "0"
    assert is_of(serving.model, serving.generate(PROMPT))


def test_a_trained_policy_is_served_as_the_trainer_wrote_it(
    serving: Serving, one_rank: World, tmp_path: Path, base: None
) -> None:
    """Three steps on random rollouts; transformers and the engine read the same files to the same log-probabilities."""
    run, rng = RunDir(tmp_path), np.random.default_rng(0)
    with small_trainer(serving.model, one_rank, tmp_path) as core:
        for step in (1, 2, 3):
            result = core.train_step(step, [random_row(rng, [12, 30, 9])], ["a"])
            assert not result.is_skipped
        publish_policy(run, core, 3)
    policy = run.weights_step(3)
    report = update(serving, policy, 3)
    assert report.is_served and not report.failed, report
    generated = serving.generate(PROMPT)
    assert is_of(policy, generated)
    assert not is_of(serving.model, generated)


def test_a_request_in_flight_goes_on_with_the_new_weights(
    serving: Serving, variant: Path, base: None
) -> None:
    """Paused in the middle of a stream, updated with the KV recomputed, resumed: no token is lost."""
    max_tokens = 480
    parameters = {"max_tokens": max_tokens, "temperature": 1.0, "logprobs": 1, "seed": 1, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": parameters, "stream": True}
    tokens: list[int] = []
    logprobs: list[float] = []
    url = serving.url("inference-0")
    with httpx.stream(
        "POST",
        f"{url}/inference/v1/generate",
        json=body,
        headers=serving.headers,
        timeout=120,
        trust_env=False,
    ) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            if not tokens:
                assert serving.post("inference-0", "/pause", {"clear_cache": True}).status_code == 200
                answer = serving.post("inference-0", "/update_weights", {"path": str(variant), "version": 1})
                assert answer.json() == {"version": 1}
                assert serving.post("inference-0", "/resume", {}).status_code == 200
            tokens += choice["token_ids"]
            logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert len(tokens) == len(logprobs) == max_tokens
    of_base, of_variant = (hf_logprobs(model, PROMPT, tokens) for model in (serving.model, variant))
    num_before = next(i for i, logprob in enumerate(logprobs) if abs(logprob - of_base[i]) > TOLERANCE)
    assert 0 < num_before < max_tokens
    assert logprobs[num_before:] == pytest.approx(of_variant[num_before:], abs=TOLERANCE)


@pytest.mark.parametrize("damage", ["missing folder", "truncated", "tensor missing", "other shape"])
def test_a_bad_folder_is_refused_and_the_old_weights_keep_serving(
    serving: Serving, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "weights"
    if damage != "missing folder":
        shutil.copytree(serving.model, folder)
        spoil(folder / "model.safetensors", damage)
    report = update(serving, folder, 9)
    assert set(report.failed) == {"inference-0"}
    assert str(folder) in report.failed["inference-0"]
    assert not serving.run.restart_request("inference-0").exists()
    assert asyncio.run(with_fleet(serving, Fleet.versions)) == {"inference-0": 0}
    assert is_of(serving.model, serving.generate(PROMPT))


def spoil(file: Path, damage: str) -> None:
    from safetensors.numpy import load_file, save_file

    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
        return
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensor = tensors.pop(name)
    if damage == "other shape":
        tensors[name] = tensor[..., :-1].copy()
    save_file(tensors, file)


def test_a_killed_engine_comes_back_at_its_url_with_the_newest_version_and_follows_links_from_there(
    serving: Serving, variant: Path, base: None
) -> None:
    url, run = serving.url("inference-0"), serving.run
    write_whole(run, 3, variant)
    sockets = scratch_path(run, "inference-0")
    left = {path.name for path in sockets.iterdir()}
    serving.kill("inference-0")
    serving.start("inference-0")
    assert serving.url("inference-0") == url
    assert left and not left & {path.name for path in sockets.iterdir()}
    assert asyncio.run(with_fleet(serving, Fleet.versions)) == {"inference-0": 3}
    assert not run.has_lease(run.weights_step(3))
    serving.wait_for_router()
    assert is_of(variant, serving.generate(PROMPT))

    write_link(run, 4, variant, serving.model)
    reader = DeltaWeightReader(run)
    chain = reader.open(4, "test")
    report = asyncio.run(with_fleet(serving, lambda fleet: fleet.reconcile(chain, 4)))
    assert report.updated == ("inference-0",)
    assert is_of(serving.model, serving.generate(PROMPT))

    (delta,) = write_link(run, 5, serving.model, variant).glob("*.delta")
    delta.write_bytes(delta.read_bytes()[:-9])
    report = update(serving, reader.open(5, "test"), 5)
    assert report.is_refused and not report.updated and str(delta) in report.failed["inference-0"]
    assert asyncio.run(with_fleet(serving, Fleet.versions)) == {"inference-0": 4}
    assert is_of(serving.model, serving.generate(PROMPT))
    for folder in (run.weights, run.deltas):
        shutil.rmtree(folder)


def model_file(model: Path) -> bytes:
    """The model's weights as a file that depends on nothing but their values."""
    from safetensors.numpy import load_file, save

    return save(dict(sorted(load_file(model / "model.safetensors").items())))


def write_whole(run: RunDir, version: int, model: Path) -> None:
    writer = WeightWriter(run, version)
    writer.begin()
    entries = writer.copy_model_files(model, dtype="float32")
    path = writer.shard_path(1, of=1)
    path.write_bytes(model_file(model))
    writer.commit([*entries, writer.finish_file(path)])


def write_link(run: RunDir, version: int, before: Path, after: Path) -> Path:
    old, new = (np.frombuffer(model_file(model), np.uint8) for model in (before, after))
    link, name = LinkWriter(run, version), "model-00001-of-00001.safetensors"
    link.begin()
    entry = link.write(name, encode(old, new, word_bytes=4))
    return link.commit([entry], [{"name": name, "size_bytes": len(new), "crc32": zlib.crc32(new)}])
