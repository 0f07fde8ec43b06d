"""Supervised rows with images: forms in which rows hold them, their tokens, their pixels, and what is refused."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from primerl_hpc.common.errors import DataError
from primerl_hpc.envs.shipped.color_squares import image_url
from primerl_hpc.recipe.renderer import load_tokenizer, make_renderer
from primerl_hpc.recipe.schema.model import Model
from primerl_hpc.recipe.schema.sft import LossMask
from primerl_hpc.recipe.sft.rows import Row, check_row
from primerl_hpc.trainer.sft.stream import make_row
from primerl_hpc.trainer.sft.tokens import Tokenizer, pack_samples, unpack_samples
from primerl_hpc.transport.rollouts.pictures import Pictures
from tests.support.helpers import make_tiny_model

RED, BLUE = (200, 40, 40), (40, 40, 200)
SQUARE, PAIR = image_url([RED], 16), image_url([RED, BLUE], 16)
"""Images of 4 and 8 tokens."""
FILE = base64.b64decode(SQUARE.partition(",")[2])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = make_tiny_model(
        tmp_path_factory.mktemp("colors"), task="color-squares", rows=1, hidden=32, layers=1
    )
    return Model.model_validate({"name": str(folder / "model"), "renderer": {"name": "qwen3-vl"}})


def row_of(folder: Path, *parts: Any, **columns: Any) -> Row:
    content = [*parts, {"type": "text", "text": "which?"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "red"}]
    return Row(f"{folder / 'data.jsonl'}:1", {"messages": messages, **columns})


def tokenizer_of(model: Model, rows: list[Row], *, seq_len: int = 64, sees: bool = True) -> Tokenizer:
    renderer = make_renderer(model, load_tokenizer(model))
    made = Tokenizer(rows, renderer, LossMask(), seq_len)
    made.pictures = Pictures(model.name) if sees else None
    made.prepare(list(range(len(rows))))
    return made


@pytest.mark.parametrize(
    ("part", "columns"),
    [
        ({"type": "image_url", "image_url": {"url": SQUARE}}, {}),
        ({"type": "image", "image": SQUARE}, {}),
        ({"type": "image", "image": "pictures/red.png"}, {}),
        ({"type": "image", "image": {"bytes": FILE, "path": None}}, {}),
        ({"type": "image"}, {"images": [SQUARE]}),
        ({"type": "image", "text": None, "image": None}, {"images": [{"path": "pictures/red.png"}]}),
    ],
    ids=["url", "data", "path", "bytes", "column", "column of files"],
)
def test_every_form_of_an_image_gives_the_same_tokens_and_pixels(
    model: Model, tmp_path: Path, part: dict[str, Any], columns: dict[str, Any]
) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/red.png").write_bytes(FILE)
    row = row_of(tmp_path, part, **columns)
    check_row(row)
    tokenizer = tokenizer_of(model, [row, row_of(tmp_path)])
    sample, text = tokenizer[0], tokenizer[1]
    ((start, count),) = sample.images
    assert count == 4 and len(sample.input_ids) == len(text.input_ids) + 6  # start and end of the image
    assert len(set(sample.input_ids[start : start + count])) == 1 and not sample.is_trained[:start].any()
    (placed,) = tokenizer.pictures_of(sample)
    assert placed.picture.grid == (1, 4, 4) and placed.picture.pixels.shape[0] == 16
    assert text.images == () and tokenizer.pictures_of(text) == []
    assert sample.input_ids[sample.is_trained].tolist() == text.input_ids[text.is_trained].tolist()


def test_a_row_of_several_samples_places_each_image_at_its_tokens(model: Model, tmp_path: Path) -> None:
    parts = [{"type": "image", "image": url} for url in (SQUARE, PAIR)]
    tokenizer = tokenizer_of(model, [row_of(tmp_path, *parts), row_of(tmp_path, parts[1])])
    samples = unpack_samples(pack_samples([tokenizer[0], tokenizer[1]]))
    packed = make_row(samples, tokenizer.pictures_of)
    pad = load_tokenizer(model).convert_tokens_to_ids("<|image_pad|>")
    places = np.concatenate([np.arange(each.start, each.start + each.length) for each in packed.images])
    assert places.tolist() == np.flatnonzero(packed.input_ids == pad).tolist()
    assert [each.length for each in packed.images] == [4, 8, 8]
    assert packed.images[1].picture is packed.images[2].picture  # processed once
    assert not packed.weights("ce")[places].any()


def test_a_sample_is_cut_before_an_image_that_does_not_fit(model: Model, tmp_path: Path) -> None:
    row = row_of(tmp_path, {"type": "image", "image": SQUARE}, {"type": "image", "image": PAIR})
    whole = tokenizer_of(model, [row])[0]
    second = whole.images[1][0]
    sample = tokenizer_of(model, [row], seq_len=second + 3)[0]
    assert len(sample.input_ids) == second and sample.images == whole.images[:1]
    assert sample.num_cut == len(whole.input_ids) - second


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "image", "image": "missing.png"}, "the image 'missing.png' cannot be read"),
        ({"type": "image", "image": "https://host/a.png"}, "cannot be read"),
        ({"type": "image", "image": "data:image/png;base64,?"}, "cannot be read"),
        ({"type": "image", "image": b"no image"}, "not an image in PNG, JPEG, WEBP or GIF"),
        ({"type": "image"}, "content of type 'image', which is not trained"),
        ({"type": "video", "video": "a.mp4"}, "content of type 'video', which is not trained"),
    ],
)
def test_what_is_no_image_is_refused_by_row(
    model: Model, tmp_path: Path, part: dict[str, Any], says: str
) -> None:
    with pytest.raises(DataError, match=rf"data\.jsonl:1: .*{says}"):
        tokenizer_of(model, [row_of(tmp_path, part)])


def test_images_are_refused_where_they_would_be_lost(model: Model, tmp_path: Path) -> None:
    row = row_of(tmp_path, {"type": "image", "image": SQUARE})
    with pytest.raises(DataError, match="the model's vision tower is not loaded"):
        tokenizer_of(model, [row], sees=False)
    for name in ("qwen3", "default"):
        other = model.model_copy(update={"renderer": model.renderer.model_copy(update={"name": name})})
        with pytest.raises(DataError, match=r"the row has images, which .* does not render"):
            tokenizer_of(other, [row])
    with pytest.raises(DataError, match="the row has images, which renderer 'chatml' does not render"):
        check_row(row, "renderer 'chatml'")
