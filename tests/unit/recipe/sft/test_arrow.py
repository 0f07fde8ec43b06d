"""Rows of Arrow tables have the keys that their authors wrote."""

import itertools
import json
import random
import runpy

import pytest

from primerl_hpc.recipe.renderer import make_renderer
from primerl_hpc.recipe.schema.model import Model
from primerl_hpc.recipe.schema.sft import LossMask, SFTData
from primerl_hpc.recipe.sft.tables import open_rows
from primerl_hpc.trainer.sft.tokens import Tokenizer
from tests.support.helpers import ROOT


def tool(name: str, properties: dict) -> dict:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


def conversation(name: str, arguments: dict) -> list[dict]:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "assistant", "content": "a"},
    ]


UNIT = {"type": "string", "enum": ["c", None, "f"]}
ROWS = [
    {
        "messages": conversation("weather", {"city": "x", "days": [{"day": 1}, None]}),
        "tools": [tool("weather", {"city": {"type": "string"}, "unit": UNIT})],
        "chat_template_kwargs": {"enable_thinking": True},
    },
    {
        "messages": conversation("search", {"query": "y"}),
        "tools": [
            tool("search", {"query": {"type": "string", "anyOf": [{"minLength": 1}, {"type": "null"}]}})
        ],
        "chat_template_kwargs": {"enable_thinking": False},
    },
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The rows as JSONL, as Parquet and as a saved dataset."""
    datasets = pytest.importorskip("datasets")
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("rows")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "saved"))
    return folder


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "saved"])
def test_a_row_has_the_keys_of_its_author_in_every_format(folder, name):
    rows = open_rows(SFTData(path=str(folder / name)))
    assert [rows[index].values for index in range(2)] == ROWS


def test_the_same_rows_have_the_same_tokens_in_every_format(folder):
    pytest.importorskip("torch")
    tiny = runpy.run_path(str(ROOT / "tools" / "tiny-model"))
    searches = itertools.islice(tiny["searched_answers"](random.Random(0), 0.0), 50)
    (text_file := folder / "searches.txt").write_text("".join(json.dumps(row) + "\n" for row in searches))
    text_tokenizer = tiny["train_tokenizer"](text_file, 1024)
    model = Model.model_validate({"name": "tiny", "renderer": {"name": "qwen3"}})

    def token_ids(name: str) -> list[list[int]]:
        rows = open_rows(SFTData(path=str(folder / name)))
        tokenizer = Tokenizer(
            rows,
            make_renderer(model, text_tokenizer),
            LossMask(),
            4096,
            make_renderer=lambda kwargs: make_renderer(model, text_tokenizer, kwargs),
        )
        tokenizer.prepare([0, 1])
        return [tokenizer[index].input_ids.tolist() for index in (0, 1)]

    expected = token_ids("rows.jsonl")
    assert token_ids("rows.parquet") == expected
    assert token_ids("saved") == expected
    text = text_tokenizer.decode(expected[1])
    assert '"arguments": {"query": "y"}' in text and "city" not in text
