"""A tokenizer that has more tokens than the model has embeddings is refused before the queue."""

import json
from pathlib import Path

import pytest

from primerl_hpc.checks.recipe.model_config import load_config
from primerl_hpc.checks.recipe.token_ids import check_token_ids
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.recipe.load import parse_recipe
from tests.support.hub import cache_model

IM_START = {"id": 100, "content": "<|im_start|>", "special": True}


def files(vocab_size: int, *added: dict, vocab: object = None, **settings: object) -> dict[str, bytes]:
    """The files of a model whose plain tokens have the ids below 100."""
    vocab = {f"t{number}": number for number in range(100)} if vocab is None else vocab
    contents = {
        "config.json": {"model_type": "qwen3", "vocab_size": vocab_size},
        "tokenizer.json": {"model": {"vocab": vocab}, "added_tokens": list(added)},
        "tokenizer_config.json": settings,
    }
    return {name: json.dumps(content).encode() for name, content in contents.items()}


def check(folder: Path, contents: dict[str, bytes], renderer: str = "qwen3", **fields: object) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    model = {"name": str(folder), "renderer": {"name": renderer}}
    values = {
        "kind": "sft",
        "name": "x",
        "model": model,
        "max_steps": 1,
        "sft": {"data": {"path": "x.jsonl"}},
    }
    check_token_ids(parse_recipe(values | fields), load_config(str(folder)))


@pytest.mark.parametrize(
    ("contents", "renderer", "token"),
    [
        (files(100, IM_START), "chatml", "<|im_start|>"),
        (files(100, IM_START, chat_template="<|im_start|>user"), "default", "<|im_start|>"),
        (files(100, {**IM_START, "content": "<pad>"}, pad_token={"content": "<pad>"}), "qwen3", "<pad>"),
        (files(100, {**IM_START, "special": False}), "qwen3", "<|im_start|>"),
        (files(99), "qwen3", "t99"),
        (files(2, vocab=[["a", 0.0], ["b", -1.0], ["c", -2.0]]), "qwen3", "c"),
        (
            files(100, added_tokens_decoder={"100": {"content": "<|im_end|>", "special": True}}),
            "chatml",
            "<|im_end|>",
        ),
    ],
)
def test_a_token_without_an_embedding_is_refused_with_its_text(tmp_path, contents, renderer, token):
    with pytest.raises(ConfigError) as raised:
        check(tmp_path / "model", contents, renderer)
    text = str(raised.value)
    assert f"has the token {token!r} with id" in text and "embeddings (vocab_size of its config.json)" in text
    assert "set model.tokenizer" in raised.value.hint


def test_tokens_that_fit_or_that_nothing_writes_are_accepted(tmp_path):
    check(tmp_path / "fits", files(101, IM_START), "chatml")
    check(tmp_path / "image", files(100, {**IM_START, "content": "<image_soft_token>"}))  # Gemma 3 1B
    check(tmp_path / "incomplete", {"config.json": b'{"vocab_size": 1}'})


def test_a_tokenizer_in_the_hub_cache_is_compared_with_the_model_and_the_teacher(tmp_path):
    cache_model(tmp_path / "hub", "org/student", files(101, IM_START))
    cache_model(tmp_path / "hub", "org/teacher", files(100))
    model = {"name": "org/student", "renderer": {"name": "chatml"}}
    values = {
        "kind": "rl",
        "name": "x",
        "max_steps": 1,
        "model": model,
        "environments": {"train": [{"id": "reverse-text"}]},
        "algorithm": {"type": "opd"},
        "teacher": {"model": {"name": "org/teacher", "renderer": {"name": "chatml"}}},
    }
    with pytest.raises(ConfigError, match="with id 100, but model org/teacher has 100 embeddings"):
        check_token_ids(
            parse_recipe(values), load_config("org/student", {"HF_HUB_CACHE": str(tmp_path / "hub")})
        )
