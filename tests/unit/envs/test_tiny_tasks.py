"""Tasks of tools/tiny-model with their own tokenizer: demonstrations are rollouts that the environment rewards."""

from __future__ import annotations

import itertools
import json
import random
import runpy
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from primerl_hpc.envs.serving.games import share_word_lists
from primerl_hpc.recipe.renderer import make_renderer
from primerl_hpc.recipe.schema.model import Model
from tests.support.helpers import ROOT
from tests.unit.envs.test_shipped_envs import play


@pytest.fixture(scope="module")
def tiny() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "tiny-model"))


@pytest.fixture(scope="module")
def rows(tiny: dict[str, Any]) -> list[dict[str, Any]]:
    return list(itertools.islice(tiny["searched_answers"](random.Random(0), 0.0), 200))


@pytest.fixture(scope="module")
def tokenizer(
    tiny: dict[str, Any], rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    path = tmp_path_factory.mktemp("tiny") / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tiny["train_tokenizer"](path, 1024)


def test_the_tiny_tokenizer_serves_the_renderer_of_the_real_recipe(tokenizer: Any, rows: list[dict]) -> None:
    renderer = make_renderer(Model.model_validate({"name": "tiny", "renderer": {"name": "qwen3"}}), tokenizer)
    for row in rows[:20]:
        ids = renderer.render_ids(row["messages"], tools=row["tools"])
        text = tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
        assert tokenizer.decode(ids) == text
        call = row["messages"][1]["tool_calls"][0]["function"]
        prompt = renderer.render_ids(row["messages"][:1], tools=row["tools"], add_generation_prompt=True)
        reply = renderer.render_ids(row["messages"][:2], tools=row["tools"])[len(prompt) :]
        [parsed] = renderer.parse_response(reply).tool_calls
        assert (parsed.name, parsed.arguments) == (call["name"], json.loads(call["arguments"]))


def test_the_last_search_of_a_demonstration_finds_the_answer(rows: list[dict]) -> None:
    numbers = set()
    for row in rows:
        *_, result, reply = row["messages"]
        assert reply["content"] in result["content"].split("\n\n")[0]
        numbers.add(len(row["messages"]))
    assert numbers == {4, 6}  # one search or two


@pytest.fixture(scope="module")
def games(tiny: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """textarena with the word lists of tools/tiny-model."""
    textarena = pytest.importorskip("textarena", reason="the games need verifiers[ta]")
    folder = tmp_path_factory.mktemp("nltk")
    tiny["write_word_lists"](folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nltk.data.path", [str(folder)])
        yield textarena


@pytest.mark.usefixtures("games")
def test_a_game_of_wordle_runs_with_word_lists_made_here(tiny: dict[str, Any]) -> None:
    def guess(request: dict[str, Any]) -> dict[str, Any]:
        """Guess the first noun that agrees with all feedback."""
        seen = [m["content"].split("\n") for m in request["messages"] if m["role"] == "user"][1:]
        history = [(word.replace(" ", "").lower(), marks) for word, marks, *_ in seen]
        return {"content": f"[{tiny['candidates'](history)[0]}]"}

    trace = play(guess, "textarena", game="Wordle-v0")["player"]
    assert trace["rewards"] == {"game_reward": 1.0} and trace["turns"] > 1


def test_games_share_their_word_lists(
    tiny: dict[str, Any], games: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = import_module("nltk.tag")
    for module, name in (
        (import_module("textarena.envs.utils.word_lists"), "EnglishDictionary"),
        (tag, "_get_tagger"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # restored at the end
    share_word_lists("textarena")
    monkeypatch.delitem(
        sys.modules, "textarena.envs.Wordle.env", raising=False
    )  # it imports the dictionary by name
    first, second = (games.make(env_id="Wordle-v0") for _ in range(2))
    assert first.dictionary is second.dictionary
    assert tag._get_tagger("eng") is tag._get_tagger("eng")
    assert second.word_list == list(tiny["NOUNS"])
