"""A real engine behind the real router: tokens and log-probabilities, weight updates in flight, keys, restarts."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoTokenizer

from primerl_hpc.cli.main import cli
from primerl_hpc.common.names import Role
from primerl_hpc.observe.inside import engine_traces
from primerl_hpc.orchestrator.engines.fleet import Fleet, FleetOptions
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.training import LoRA, TrainerConfig
from primerl_hpc.roles.scratch import scratch_path
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.trainer.batch import ForwardInputs
from primerl_hpc.trainer.model.policy import build_policy
from primerl_hpc.trainer.parallel.mesh import World
from primerl_hpc.trainer.train_step import Trainer, build_trainer
from primerl_hpc.trainer.watchdog import Watchdog
from primerl_hpc.trainer.weights.filesystem import publish_policy
from primerl_hpc.transport.weights.delta import DeltaWeightReader, LinkWriter
from primerl_hpc.transport.weights.delta_codec import encode
from primerl_hpc.transport.weights.filesystem import WeightWriter
from primerl_hpc.transport.weights.sources import Source
from tests.e2e.test_trainer import rl_recipe
from tests.support.helpers import make_tiny_model, random_row
from tests.support.serving import Serving, hf_logprobs, save_variant
from tests.support.tiny_adapters import export_random_adapter
from tests.support.tiny_adapters import load as load_model
from tests.support.tiny_models import LONGROPE, make_family

pytestmark = pytest.mark.e2e

SIXTEEN_FACTORS = {"short_factor": 1.0, "long_factor": 4.0}  # of heads of 32, and the first of each
PROMPT = [1, 5, 103, 40, 41, 42, 2]
NAMED_RANKS = {"one": 8, "two": 4, "too-large": 16}
TOLERANCE = 1e-4  # both sides compute in float32


@pytest.fixture(scope="module")
def variant(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_variant(serving.model, serving.room(tmp_path_factory.mktemp("variant")) / "model", seed=7)


@pytest.fixture
def base(serving: Serving):
    """Afterwards the engine serves version 0 again."""
    yield
    asyncio.run(with_fleet(serving, lambda fleet: fleet.update(serving.model, 0)))


async def with_fleet(serving: Serving, action):
    fleet = Fleet(serving.run, serving.keys, FleetOptions(backoff_s=0.05))
    try:
        return await action(fleet)
    finally:
        await fleet.close()


def update(serving: Serving, source: Source, version: int):
    return asyncio.run(with_fleet(serving, lambda fleet: fleet.update(source, version)))


@contextmanager
def small_trainer(model: Path, world: World, folder: Path) -> Iterator[Trainer]:
    recipe = Recipe.model_validate(rl_recipe(model, optimizer={"type": "adamw", "lr": 1e-2}))
    watchdog = Watchdog(RunDir(folder), "trainer-0", rank=0, size=1, timeout_s=600)
    try:
        yield build_trainer(recipe, str(model), world, watchdog)
    finally:
        watchdog.pause()  # it would end the process of all tests


def is_of(model: Path, generated: dict) -> bool:
    expected = hf_logprobs(model, PROMPT, generated["token_ids"])
    return generated["logprobs"] == pytest.approx(expected, abs=TOLERANCE)


def test_generation_through_the_router_has_the_logprobs_of_transformers(serving: Serving) -> None:
    generated = serving.generate(PROMPT)
    assert len(generated["token_ids"]) == 16
    assert is_of(serving.model, generated)


def test_more_seeded_prompts_than_fit_into_a_batch_all_get_responses(serving: Serving) -> None:
    # 12 × 455 tokens; a batch of the engine has 2,048
    prompts = [[first, *range(5, 95)] * 5 for first in range(1, 13)]
    alone = serving.generate(prompts[-1], 4)
    with ThreadPoolExecutor(len(prompts)) as pool:
        generated = list(pool.map(lambda prompt: serving.generate(prompt, 4), prompts))
    assert [len(each["token_ids"]) for each in generated] == [4] * len(prompts)
    assert generated[-1]["token_ids"] == alone["token_ids"]


def test_the_router_serves_models_and_chat(serving: Serving) -> None:
    models = serving.get("router-0", "/v1/models")
    assert [model["id"] for model in models["data"]] == [serving.recipe.model.name]
    body = {
        "model": serving.recipe.model.name,
        "messages": [{"role": "user", "content": "abc"}],
        "max_tokens": 4,
        "ignore_eos": True,  # a model of random weights may end its turn at any token
    }
    answer = serving.post("router-0", "/v1/chat/completions", body)
    assert answer.json()["usage"]["completion_tokens"] == 4


def test_no_route_responds_without_the_key(serving: Serving) -> None:
    engine, router = serving.url("inference-0"), serving.url("router-0")
    generate = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
    with httpx.Client(verify=serving.keys.client_context(), trust_env=False) as client:
        for url in (engine, router):
            for route in ("/v1/models", "/health", "/metrics", "/list_workers", "/primerl/engines"):
                assert client.get(f"{url}{route}").status_code == 401, route
            assert client.post(f"{url}/inference/v1/generate", json=generate).status_code == 401
            for route in ("/pause", "/update_weights", "/reload_weights", "/add_worker", "/flush_cache"):
                assert client.post(f"{url}{route}", json={}).status_code == 401
        for route in ("/primerl/state", "/version", "/load", "/docs", "/openapi.json"):
            assert client.get(f"{engine}{route}").status_code == 401, route
        for route in ("/tokenize", "/invocations", "/collective_rpc", "/scale_elastic_ep", "/start_profile"):
            assert client.post(f"{engine}{route}", json={}).status_code == 401, route


def test_admin_requests_are_not_forwarded_by_the_router(serving: Serving) -> None:
    assert serving.post("router-0", "/pause", {}).status_code != 200
    assert serving.get("inference-0", "/primerl/state")["paused"] is False


def test_the_key_is_in_no_command_line_and_no_log(serving: Serving) -> None:
    key = serving.keys.api_key
    for name in serving.processes:
        assert key not in serving.log(name)
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert key.encode() not in cmdline.read_bytes()
        except OSError:  # ended meanwhile
            continue


def test_an_update_serves_the_new_weights_and_a_reload_restores_the_base_model(
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
    """After three steps on random rollouts, transformers and the engine compute equal log-probabilities from the
    files."""
    run, rng = RunDir(serving.room(tmp_path)), np.random.default_rng(0)
    with small_trainer(serving.model, one_rank, tmp_path) as trainer:
        for step in (1, 2, 3):
            result = trainer.train_step(step, [random_row(rng, [12, 30, 9])], ["a"])
            assert not result.is_skipped
        publish_policy(run, trainer, 3)
    policy = run.weights_step(3)
    report = update(serving, policy, 3)
    assert report.is_served and not report.failed, report
    generated = serving.generate(PROMPT)
    assert is_of(policy, generated)
    assert not is_of(serving.model, generated)


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_adapters_are_loaded_replaced_and_unloaded_by_name_while_the_engine_serves(tmp_path: Path) -> None:
    """An engine of kind inference; PEFT's model of each adapter computes the expected log-probabilities."""
    model = make_tiny_model(tmp_path / "tiny", rows=1) / "model"
    outside = tmp_path / "elsewhere"
    settings = {"kv_cache_gib": 0.0625, "max_model_len": 128}
    settings |= {"adapter_dirs": [str(tmp_path / "adapters")], "max_adapters": 2, "max_adapter_rank": 8}
    recipe = {"kind": "inference", "inference": settings, "environments": {}, "judge": None}
    system = Serving(tmp_path, Role.INFERENCE, model=model, recipe=recipe)
    sources = [write_adapter(model, tmp_path / "made" / name, rank) for name, rank in NAMED_RANKS.items()]
    allowed = [Path(shutil.copytree(path, tmp_path / "adapters" / path.name)) for path in sources]
    own = Path(shutil.copytree(sources[1], system.run.root / "adapter"))
    shutil.copytree(sources[0], outside)
    (tmp_path / "adapters" / "link").symlink_to(outside)

    def post(route: str, **body: object) -> tuple[int, dict]:
        answer = system.post("inference-0", f"/{route}_lora_adapter", body)
        return answer.status_code, answer.json()

    def load(name: str, path: Path) -> tuple[int, dict]:
        return post("load", lora_name=name, lora_path=str(path))

    def serves(name: str, adapter: Path | None) -> bool:
        generated = system.generate(PROMPT, name="inference-0", model=name)
        expected = hf_logprobs(model, PROMPT, generated["token_ids"], adapter=adapter)
        return generated["logprobs"] == pytest.approx(expected, abs=TOLERANCE)

    try:
        system.start("inference-0")
        for route in ("load", "unload"):
            with httpx.Client(verify=system.keys.client_context(), trust_env=False) as stranger:
                url = f"{system.url('inference-0')}/{route}_lora_adapter"
                assert stranger.post(url, json={"lora_name": "a"}).status_code == 401
        assert load("math", allowed[0]) == (200, {"adapters": ["math"]})
        assert serves("math", sources[0]) and serves(str(model), None) and not serves("math", None)
        assert load("math", own)[0] == 200, "a name that is served gets the new files"
        assert serves("math", sources[1]) and not serves("math", sources[0])
        assert load("code", allowed[0]) == (200, {"adapters": ["code", "math"]})
        assert serves("code", sources[0]) and serves("math", sources[1])
        refused = {
            "400 none": post("load", lora_name="x"),
            "403 outside": load("x", outside),
            "403 link": load("x", tmp_path / "adapters" / "link"),
            "409 full": load("x", allowed[1]),
            "409 base": load(str(model), allowed[1]),
            "422 missing": load("math", tmp_path / "adapters" / "none"),
            "422 rank": load("math", allowed[2]),
            "404 unknown": post("unload", lora_name="x"),
        }
        assert all(str(code) == name[:3] and body["error"] for name, (code, body) in refused.items()), refused
        assert serves("math", sources[1]), "the refused requests changed nothing"
        assert post("unload", lora_name="math") == (200, {"adapters": ["code"]})
        asked = {"model": "math", "token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
        assert system.post("inference-0", "/inference/v1/generate", asked).status_code == 404
        assert serves("code", sources[0])
    finally:
        system.stop()


def write_adapter(model: Path, folder: Path, rank: int) -> Path:
    """Write an adapter that changes the model's output as the trainer writes them, and return its folder."""
    base = load_model(model)
    made = export_random_adapter(base, model, RunDir(folder / "run"), LoRA(rank=rank), seed=rank)
    return Path(shutil.copytree(made, folder / folder.name))


def test_an_engine_without_room_for_adapters_refuses_them_by_name(serving: Serving, tmp_path: Path) -> None:
    body = {"lora_name": "a", "lora_path": str(serving.room(tmp_path))}
    answer = serving.post("inference-0", "/load_lora_adapter", body)
    assert answer.status_code == 409 and "inference.adapter_dirs" in answer.json()["error"]


@pytest.mark.slow
def test_an_engine_and_the_trainer_use_the_same_longrope_factors(
    serving: Serving, one_rank: World, tmp_path: Path
) -> None:
    """max_model_len 512 exceeds the original length 32: the long factors apply to short documents too, unlike in
    transformers."""
    factors = {name: [start + place / 4 for place in range(16)] for name, start in SIXTEEN_FACTORS.items()}
    rope = LONGROPE["rope_parameters"] | factors
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    vocab = json.loads((serving.model / "config.json").read_text())["vocab_size"]
    changes = LONGROPE | shape | {"rope_parameters": rope, "vocab_size": vocab, "eos_token_id": 2}
    model = make_family("phi3", tmp_path / "model", **changes)
    AutoTokenizer.from_pretrained(serving.model).save_pretrained(model)
    system = Serving(tmp_path, Role.INFERENCE, model=model)
    try:
        system.start("inference-0")
        generated = system.generate(PROMPT, name="inference-0")
    finally:
        system.stop()
    ids = PROMPT + generated["token_ids"]
    assert len(ids) < rope["original_max_position_embeddings"]
    recipe = system.recipe.model_copy(update={"trainer": TrainerConfig(param_dtype="float32")})
    policy = build_policy(recipe, model, one_rank)
    positions, predictors = torch.arange(len(ids)), torch.arange(len(PROMPT) - 1, len(ids) - 1)
    tokens = torch.tensor(ids)
    logprobs, _ = policy(
        ForwardInputs(
            input_ids=tokens[None],
            position_ids=positions[None],
            predictors=predictors,
            targets=tokens[predictors + 1],
        )
    )
    assert generated["logprobs"] == pytest.approx(logprobs.tolist(), abs=TOLERANCE)
    assert not is_of(model, generated)


def test_a_request_in_flight_continues_with_the_new_weights(
    serving: Serving, variant: Path, base: None
) -> None:
    """A stream that is paused, updated with its KV cache recomputed, and resumed loses no token."""
    max_tokens = 480
    parameters = {"max_tokens": max_tokens, "temperature": 1.0, "logprobs": 1, "seed": 1, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": parameters, "stream": True}
    tokens: list[int] = []
    logprobs: list[float] = []
    url = serving.url("inference-0")
    with serving.client.stream("POST", f"{url}/inference/v1/generate", json=body) as stream:
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
def test_an_invalid_folder_is_refused_and_the_old_weights_are_still_served(
    serving: Serving, tmp_path: Path, damage: str
) -> None:
    folder = serving.room(tmp_path) / "weights"
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


def test_a_killed_engine_restarts_at_its_url_with_the_newest_version_and_follows_deltas(
    serving: Serving, variant: Path, base: None
) -> None:
    url, run = serving.url("inference-0"), serving.run
    write_full(run, 3, variant)
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


@pytest.mark.slow
def test_a_version_that_one_data_parallel_rank_cannot_open_is_served_by_no_rank(tmp_path: Path) -> None:
    """The second rank has no file descriptors left and refuses; the first one keeps its weights too."""
    engine = Serving(tmp_path, Role.INFERENCE, layout={"data_parallel": 2})

    def generate() -> list[dict]:  # on both ranks: each takes the next request while the other is busy
        with ThreadPoolExecutor(6) as pool:
            return [*pool.map(lambda _: engine.generate(PROMPT, 48, name="inference-0"), range(6))]

    variant = save_variant(engine.model, engine.room(tmp_path) / "variant", seed=7)
    body = {"path": str(variant), "version": 1}
    try:
        engine.start("inference-0")
        children = psutil.Process(engine.processes["inference-0"].pid).children(recursive=True)
        (core,) = [each for each in children if "EngineCore_DP1" in " ".join(each.cmdline())]
        (second,) = [each for each in core.children() if "Worker" in " ".join(each.cmdline())]
        soft, hard = second.rlimit(psutil.RLIMIT_NOFILE)
        used = {int(path.name) for path in Path(f"/proc/{second.pid}/fd").iterdir()}
        free = next(number for number in itertools.count() if number not in used)
        second.rlimit(psutil.RLIMIT_NOFILE, (free, hard))
        answer = engine.post("inference-0", "/update_weights", body)
        assert answer.status_code == 422, answer.text
        assert "1 of 2 workers cannot load" in answer.text and "Too many open files" in answer.text
        assert engine.get("inference-0", "/primerl/state")["version"] == 0
        second.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
        assert all(is_of(engine.model, generated) for generated in generate())

        assert engine.post("inference-0", "/update_weights", body).json() == {"version": 1}
        assert all(is_of(variant, generated) for generated in generate())
    finally:
        engine.stop()


def model_file(model: Path) -> bytes:
    """The model's weights as a file that depends only on their values."""
    from safetensors.numpy import load_file, save

    return save(dict(sorted(load_file(model / "model.safetensors").items())))


def write_full(run: RunDir, version: int, model: Path) -> None:
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
    return link.commit([entry], [{"name": name, "size_bytes": len(new), "crc32": zlib.crc32(new.tobytes())}])


@pytest.mark.slow
def test_profile_writes_traces_of_a_serving_engine_and_names_one_without_requests(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def profile(steps: int, engines: str = "inference") -> Any:
        words = ["profile", str(serving.run.root), "--engines", engines, "--steps", str(steps), "--json"]
        return CliRunner().invoke(cli, words, standalone_mode=False)

    with ThreadPoolExecutor(1) as pool:
        busy = True

        def keep_busy() -> None:
            while busy:
                serving.generate(PROMPT, 64)

        load = pool.submit(keep_busy)
        try:
            done = profile(5, "inference-0")
        finally:
            busy = False
        load.result()
    shown = json.loads(done.stdout)
    assert done.return_value == 0 and shown["is_complete"], done.output
    (path,) = map(Path, shown["traces"])
    assert path.parent == serving.run.root / "profiles" / "inference-0"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = [event for event in events if str(event.get("name", "")).startswith("execute_")]
    assert len(steps) >= 5 <= shown["iterations"]["inference-0"]
    assert any("mm" in str(event.get("name")) for event in events)  # operators of the model
    monkeypatch.setattr(engine_traces, "LIMIT_S", 0.5)
    idle = profile(5)
    assert (
        idle.return_value == 1 and "it had no requests" in json.loads(idle.stdout)["problems"]["inference-0"]
    )
    assert "no running engine 'judge'" in str(profile(5, "judge").exception)
    assert serving.generate(PROMPT)["token_ids"]  # the profiler has stopped, and the engine serves
