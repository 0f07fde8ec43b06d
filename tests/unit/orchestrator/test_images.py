"""Images from a rollout's messages to the trainer's forward, with a real image processor and a real, tiny Qwen3-VL."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from PIL import Image  # noqa: E402
from transformers import AutoModelForImageTextToText  # noqa: E402
from verifiers.v1.graph import MessageNode  # noqa: E402
from verifiers.v1.types import (  # noqa: E402
    ImageUrlContentPart,
    ImageUrlSource,
    TextContentPart,
    UserMessage,
)

from primerl_hpc.common.errors import DataError  # noqa: E402
from primerl_hpc.orchestrator.batches.packing import pack  # noqa: E402
from primerl_hpc.orchestrator.rollout_data import (  # noqa: E402
    Rollout,
    RolloutFailed,
    TrainSample,
)
from primerl_hpc.orchestrator.rollouts.images import ImageReader  # noqa: E402
from primerl_hpc.orchestrator.rollouts.trajectories import rollout_of  # noqa: E402
from primerl_hpc.recipe.load import parse_recipe  # noqa: E402
from primerl_hpc.recipe.schema.layout import TrainerLayout  # noqa: E402
from primerl_hpc.recipe.schema.model import Model  # noqa: E402
from primerl_hpc.recipe.schema.recipe import Recipe  # noqa: E402
from primerl_hpc.run.rundir import RunDir  # noqa: E402
from primerl_hpc.trainer.batch import make_batch  # noqa: E402
from primerl_hpc.trainer.model.policy import build_policy  # noqa: E402
from primerl_hpc.trainer.parallel.mesh import make_world  # noqa: E402
from primerl_hpc.transport.rollouts.filesystem import (  # noqa: E402
    IMAGES,
    FilesystemReceiver,
    FilesystemSender,
)
from primerl_hpc.transport.rollouts.micro_batch import StepInfo  # noqa: E402
from tests.support.tiny_models import (  # noqa: E402
    IMAGE_TOKEN,
    VISION_FAMILIES,
    VISION_START,
    make_family,
    make_vision_language,
)
from tests.unit.orchestrator.test_trajectories import episode, prompt, reply, trace  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_vision_language(tmp_path_factory.mktemp("vl"))


def picture_url(seed: int, height: int, width: int) -> str:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


SQUARE, WIDE = picture_url(1, 16, 16), picture_url(2, 16, 32)  # 4 and 8 tokens


def showing(*images: tuple[str, int], parent: int | None = None, text: int = 5) -> MessageNode:
    """A message with images, each as so many tokens."""
    ids = [text, text + 1]
    for _, count in images:
        ids += [VISION_START, *[IMAGE_TOKEN] * count, 96]
    parts = [ImageUrlContentPart(image_url=ImageUrlSource(url=url)) for url, _ in images]
    message = UserMessage(content=[TextContentPart(text="look"), *parts])
    return MessageNode(parent=parent, message=message, token_ids=ids, mask=[False] * len(ids))


def rollout(model: Path, *nodes: MessageNode, reader: ImageReader | None = None) -> Rollout:
    made = trace(list(nodes))
    made.mm_token_type_id_map = {IMAGE_TOKEN: 1, 99: 2}
    whole = episode(made)
    found = rollout_of(whole, temperature=1.0)
    asyncio.run((reader or ImageReader(Model(name=str(model)))).add_images(found, whole))
    return found


def test_images_are_found_by_their_tokens_and_processed_once(model):
    reader = ImageReader(Model(name=str(model)))
    turns = [
        showing((SQUARE, 4)),
        reply([9, 7], 0),
        showing((WIDE, 8), (SQUARE, 4), parent=1),
        reply([9, 8], 2),
    ]
    (sample,) = rollout(model, *turns, reader=reader).samples
    (other,) = rollout(model, showing((WIDE, 8)), reply([9, 3], 0), reader=reader).samples
    assert [each.picture.grid for each in sample.images] == [(1, 4, 4), (1, 4, 8), (1, 4, 4)]
    for each in sample.images:
        assert set(sample.token_ids[each.start : each.start + each.length]) == {IMAGE_TOKEN}
        assert sample.token_ids[each.start - 1] == VISION_START
        assert len(each.picture.pixels) == 4 * each.length
    first, wide, again = (each.picture for each in sample.images)
    assert first is again and other.images[0].picture is wide


def test_text_alone_asks_no_processor():
    (sample,) = rollout(Path("/nowhere"), prompt([1, 2]), reply([9, 7], 0)).samples
    assert sample.images == ()


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (showing((SQUARE, 5)), "ImageMismatch: the engine made 5 tokens of an image"),
        (showing(("https://host/a.png", 4)), "ImageElsewhere"),
        (showing(("data:image/png;base64,AAAA", 4)), "DamagedImage"),
        (prompt([3, IMAGE_TOKEN, 4]), "ImageMismatch: the messages have 0 images, the tokens 1"),
        (prompt([3, 99, 4]), "NoVideo"),
    ],
)
def test_images_and_tokens_that_do_not_match_fail_the_rollout(model, node, says):
    with pytest.raises(RolloutFailed, match=says):
        rollout(model, node, reply([9, 7], 0))


def trained(found: Rollout, advantage: float = 1.0) -> TrainSample:
    (sample,) = found.samples
    return TrainSample(sample, advantage, env_id=0)


def test_a_sample_is_cut_before_an_image_that_does_not_fit_and_rows_are_of_one_kind(model):
    long = trained(
        rollout(model, showing((SQUARE, 4)), reply([9, 7], 0), showing((WIDE, 8), parent=1), reply([9, 8], 2))
    )
    text = trained(rollout(model, prompt([1, 2]), reply([9, 7], 0)))
    for seq_len in range(10, long.sample.num_tokens + 1):
        packed = pack([long, text], seq_len=seq_len, num_ranks=2)
        shown = [row for rank in packed.ranks for row in rank if row.images]
        assert len(shown) == 1 and len(shown[0].sample_lengths) == 1
        (row,) = shown
        inside = sum(each.length for each in row.images)
        assert inside == (row.input_ids == IMAGE_TOKEN).sum()
        second = long.sample.images[1]
        is_cut = second.start < seq_len < second.start + second.length
        assert row.num_tokens == (second.start if is_cut else seq_len)
    cut_in_first = pack([long], seq_len=6, num_ranks=1)
    assert cut_in_first.num_untrainable == 1


def recipe_of(model: Path, **trainer) -> Recipe:
    return parse_recipe(
        {
            "kind": "rl",
            "name": "vl",
            "model": {"name": str(model), "dtype": "float32"},
            "seq_len": 64,
            "max_steps": 1,
            "environments": {"train": [{"id": "reverse-text"}]},
            "rollouts": {"sampling": {"max_tokens": 12}},
            "trainer": {"param_dtype": "float32"} | trainer,
        }
    )


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield make_world(TrainerLayout(), torch.device("cpu"), local_rank=0, local_size=1)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("family", "vision"), [("qwen3_vl", "frozen"), *((family, "trained") for family in VISION_FAMILIES)]
)
def test_the_trainer_computes_the_same_as_transformers_for_each_sample(one_rank, tmp_path, family, vision):
    """Through packing, file and batch: log-probabilities, and gradients of their sum."""
    model = make_vision_language(tmp_path / "model", family)
    reader = ImageReader(Model(name=str(model)))
    rollouts = [
        rollout(model, showing((SQUARE, 4)), reply([9, 7, 11], 0), reader=reader),
        rollout(model, prompt([3, 4]), reply([9, 5, 12, 13], 0), reader=reader),
        rollout(
            model,
            showing((WIDE, 8), (SQUARE, 4), text=20),
            reply([9, 8], 0),
            showing((SQUARE, 4), parent=1, text=30),
            reply([9, 33, 34], 2),
            reader=reader,
        ),
        rollout(model, showing((WIDE, 8), text=40), reply([9, 17, 18, 19], 0), reader=reader),
    ]
    samples = [trained(each, float(number)) for number, each in enumerate(rollouts)]
    run = RunDir(tmp_path)
    FilesystemSender(run).send(StepInfo(1), pack(samples, seq_len=64, num_ranks=1).ranks)
    stored = np.prod(np.array([[1, 4, 4], [1, 4, 8]]), 1).sum() * 3 * 2 * 4 * 4 * 4
    size = (run.rollouts_step(1) / IMAGES).stat().st_size
    assert stored <= size <= stored + 1024  # each of the two images once
    _, rows = FilesystemReceiver(run).receive(1, 0, timeout_s=0)
    policy = build_policy(recipe_of(model, vision=vision), model, one_rank)
    text = run_policy(policy, rows[:1])
    tower = {name: each.grad for name, each in policy.hf.named_parameters() if "visual" in name}
    if vision == "trained":  # all ranks reduce the same gradients, also without images
        assert tower and all(grad is not None and not grad.full_tensor().any() for grad in tower.values())
    policy.zero_grad()
    found = run_policy(policy, rows)  # both kinds in one forward
    torch.testing.assert_close(text[1.0], found[1.0], rtol=1e-5, atol=1e-5)
    hf = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    for number, each in enumerate(samples):
        expected = expected_logprobs(hf, each)
        torch.testing.assert_close(found[float(number)], expected.detach(), rtol=1e-4, atol=1e-5)
        expected.sum().backward()
    theirs = {name: parameter.grad for name, parameter in hf.named_parameters()}
    for name, parameter in policy.hf.named_parameters():
        if vision == "frozen" and "visual" in name:
            assert parameter.grad is None and not parameter.requires_grad
        elif theirs[name] is not None:
            mine = parameter.grad.full_tensor()
            torch.testing.assert_close(mine, theirs[name], rtol=1e-3, atol=1e-4, msg=name)


def run_policy(policy: torch.nn.Module, rows: list) -> dict[float, torch.Tensor]:
    """Forward and backward of the sum; log-probabilities of the sample with each advantage."""
    batch = make_batch(rows, torch.device("cpu"))
    logprobs, _ = policy(batch)
    logprobs.sum().backward()
    return {float(each): logprobs.detach()[batch.advantages == each] for each in batch.advantages.unique()}


def expected_logprobs(hf: torch.nn.Module, each: TrainSample) -> torch.Tensor:
    """Return those of the trained tokens, by transformers' own forward on the sample alone."""
    sample = each.sample
    ids = torch.tensor(sample.token_ids.astype(np.int64))[None]
    images = {}
    if sample.images:
        images = {
            "pixel_values": torch.from_numpy(np.concatenate([one.picture.pixels for one in sample.images])),
            "image_grid_thw": torch.tensor([one.picture.grid for one in sample.images]),
            "mm_token_type_ids": (ids == IMAGE_TOKEN).int(),
        }
    logits = hf(input_ids=ids, use_cache=False, **images).logits[0, :-1].log_softmax(-1)
    logprobs = logits.gather(-1, ids[0, 1:, None])[:, 0]
    return logprobs[torch.from_numpy(sample.loss_mask[1:])]


def test_a_model_of_text_alone_does_not_pass_over_images_in_silence(model, one_rank, tmp_path):
    (row,) = pack(
        [trained(rollout(model, showing((SQUARE, 4)), reply([9, 7], 0)))], seq_len=64, num_ranks=1
    ).ranks[0]
    text = make_family("qwen3", tmp_path)
    with pytest.raises(DataError, match="contain images, but no tower of Qwen3ForCausalLM is loaded"):
        run_policy(build_policy(recipe_of(text), text, one_rank), [row])
