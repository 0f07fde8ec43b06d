"""Supervised data: trained tokens, refused rows, and a next batch that depends on the position alone."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl_hpc.common.errors import ConfigError, DataError, NotFoundError
from primerl_hpc.recipe.renderer import make_renderer
from primerl_hpc.recipe.schema.model import Model
from primerl_hpc.recipe.schema.sft import SFT, LossMask, SFTData
from primerl_hpc.recipe.sft.rows import Row, row_messages, row_tools
from primerl_hpc.recipe.sft.tables import ConcatenatedRows, open_rows
from primerl_hpc.trainer.sft import stream as sft_data
from primerl_hpc.trainer.sft import tokens as sft_tokens
from primerl_hpc.trainer.sft.checks import RowChecks
from primerl_hpc.trainer.sft.mixture import Mixture, Order, shares
from primerl_hpc.trainer.sft.stream import SFTStream, all_rows, make_row, pack_first_fit
from primerl_hpc.trainer.sft.tokens import Peers, SFTSample, Tokenizer, shares_of
from primerl_hpc.transport.rollouts.micro_batch import MicroBatch
from tests.support.helpers import PATIENCE_S, ROOT, captured, make_tiny_model
from tests.support.hub import serve_hub


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    pytest.importorskip("torch")
    from transformers import AutoTokenizer

    from primerl_hpc.recipe.chatml import ChatMLRenderer

    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), rows=1, hidden=32, layers=1)
    return ChatMLRenderer(AutoTokenizer.from_pretrained(folder / "model"))


def rows_of(*values: dict) -> list[Row]:
    return [Row(f"data.jsonl:{number}", each) for number, each in enumerate(values, start=1)]


def made_rows(stream: SFTStream) -> list[MicroBatch]:
    return [make_row(row) for row in stream.next_batch().rows]


def all_values(rows) -> list[dict]:
    return [rows[index].values for index in range(len(rows))]


def demonstrations(count: int) -> list[Row]:
    return rows_of(*({"prompt": "a" * (1 + i % 7), "completion": "b" * (1 + i % 5)} for i in range(count)))


def trained_text(renderer, values: dict, mask: LossMask) -> str:
    tokenizer = Tokenizer(rows_of(values), renderer, mask, 128)
    tokenizer.prepare([0])
    sample = tokenizer[0]
    return renderer.tokenizer.decode(sample.input_ids[sample.is_trained])


def test_mixed_columns_of_jsonl_files_lose_nothing(tmp_path):
    values = [{"messages": [{"role": "user", "content": "x"}]}, {"prompt": "p", "completion": "c", "more": 1}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, values)) + "\n")
    (tmp_path / "b.jsonl").write_text('{"prompt": "q", "completion": "d"}\n')
    rows = open_rows(SFTData(path=str(tmp_path)))
    assert all_values(rows) == [*values, {"prompt": "q", "completion": "d"}]
    assert len(open_rows(SFTData(path=str(tmp_path), num_rows=2))) == 2


def test_parquet_rows_are_read(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"prompt": ["p", "q"], "completion": ["c", "d"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    rows = open_rows(SFTData(path=str(tmp_path / "a.parquet")))
    assert [values["completion"] for values in all_values(rows)] == ["c", "d"]


def test_bad_rows_are_named_by_file_row_and_column(tmp_path):
    with pytest.raises(DataError, match=r"data\.jsonl:1: column 'completion' is missing"):
        row_messages(rows_of({"prompt": "p"})[0])
    with pytest.raises(DataError, match=r"data\.jsonl:1: column 'messages' must hold a list of messages"):
        row_messages(rows_of({"messages": ["x"]})[0])
    (tmp_path / "a.jsonl").write_text('{"prompt": "p"}\nno json\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: not valid JSON"):
        all_values(open_rows(SFTData(path=str(tmp_path / "a.jsonl"))))
    with pytest.raises(NotFoundError):
        open_rows(SFTData(path=str(tmp_path / "none.jsonl")))


def test_messages_win_over_prompt_and_completion():
    row = rows_of(
        {"messages": [{"role": "user", "content": "m", "name": None}], "prompt": "p", "completion": "c"}
    )[0]
    assert row_messages(row) == [{"role": "user", "content": "m"}]


def test_only_the_replies_and_their_stop_are_trained(renderer):
    assert trained_text(renderer, {"prompt": "ab", "completion": "ba"}, LossMask()) == "ba<|im_end|>"


def test_a_role_that_is_opted_in_has_its_text_trained(renderer):
    values = {"prompt": "ab", "completion": "ba"}
    assert trained_text(renderer, values, LossMask(user=True)) == "abba<|im_end|>"
    assert trained_text(renderer, values, LossMask(user=True, assistant=False)) == "ab"


def test_long_samples_are_cut_to_seq_len(renderer):
    tokenizer = Tokenizer(rows_of({"prompt": "a", "completion": "b" * 99}), renderer, LossMask(), 32)
    tokenizer.prepare([0])
    assert len(tokenizer[0].input_ids) == 32


def test_a_row_with_a_token_that_the_model_has_no_embedding_for_is_named(renderer):
    rows = rows_of({"prompt": "a", "completion": "b"})
    highest = max(Tokenizer(rows, renderer, LossMask(), 32).make(rows[0]).input_ids)
    Tokenizer(rows, renderer, LossMask(), 32, checks=RowChecks(highest + 1)).prepare([0])
    with pytest.raises(DataError, match=rf"data\.jsonl:1: the row has token id {highest}, but the model"):
        Tokenizer(rows, renderer, LossMask(), 32, checks=RowChecks(highest)).prepare([0])


def test_rows_without_a_trained_token_are_skipped_and_all_such_is_an_error(renderer):
    config = SFT(data=SFTData(path="x"), batch_unit="samples", batch_size=2, shuffle=False)
    rows = rows_of({"messages": [{"role": "user", "content": "u"}]}, {"prompt": "p", "completion": "c"})
    stream = SFTStream(Tokenizer(rows, renderer, LossMask(), 64), config, seq_len=64, seed=0)
    assert stream.next_batch().num_samples == 2
    assert stream.position == 4
    config = config.model_copy(update={"shuffle": True})
    stream = SFTStream(Tokenizer(rows, renderer, LossMask(), 64), config, seq_len=64, seed=0)
    for _ in range(20):  # also if the row that is skipped is the last of an epoch and the first of the next
        assert stream.next_batch().num_samples == 2
    stream = SFTStream(Tokenizer(rows[:1], renderer, LossMask(), 64), config, seq_len=64, seed=0)
    with pytest.raises(DataError, match="no row has a token to train on"):
        stream.next_batch()


@pytest.mark.parametrize("unit", ["rows", "samples"])
def test_a_stream_from_a_saved_position_continues_exactly(renderer, unit):
    config = SFT(data=SFTData(path="x"), batch_unit=unit, batch_size=3)

    def stream(position: int = 0) -> SFTStream:
        tokenizer = Tokenizer(demonstrations(11), renderer, LossMask(), 48)
        return SFTStream(tokenizer, config, seq_len=48, seed=5, position=position)

    straight = stream()
    for _ in range(4):
        straight.next_batch()
    resumed = stream(straight.position)
    for _ in range(6):
        one, other = map(made_rows, (straight, resumed))
        assert [row.input_ids.tolist() for row in one] == [row.input_ids.tolist() for row in other]
        assert unit == "samples" or len(one) == 3
        assert all(row.num_tokens <= 48 for row in one)


@pytest.mark.parametrize("kept_tokens", [0, 100])
def test_rows_are_filled_though_few_samples_are_kept_and_some_are_skipped(renderer, monkeypatch, kept_tokens):
    """A row's last sample may follow skipped ones, and a window that evicted the skipped ones."""
    untrained = rows_of(*({"messages": [{"role": "user", "content": "u"}]} for _ in range(6)))
    config = SFT(data=SFTData(path="x"), batch_size=2)

    def batches(count: int) -> list[list[int]]:
        tokenizer = Tokenizer([*demonstrations(10), *untrained], renderer, LossMask(), 24)
        stream = SFTStream(tokenizer, config, seq_len=24, seed=3)
        return [row.input_ids.tolist() for _ in range(count) for row in made_rows(stream)]

    expected = batches(40)
    monkeypatch.setattr(sft_tokens, "KEPT_TOKENS", kept_tokens)
    monkeypatch.setattr(sft_data, "WINDOW_SAMPLES", 3)
    assert batches(40) == expected


def test_an_epoch_gives_every_row_once_and_the_next_one_in_another_order(renderer):
    config = SFT(data=SFTData(path="x"), batch_unit="samples", batch_size=6)
    rows = rows_of(*({"prompt": letter, "completion": letter} for letter in "abcdef"))
    stream = SFTStream(Tokenizer(rows, renderer, LossMask(), 64), config, seq_len=4, seed=5)
    orders = [[stream.order.row(epoch * 6 + offset) for offset in range(6)] for epoch in range(3)]
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert len({tuple(order) for order in orders}) > 1


def test_peers_share_the_work_and_get_the_same_samples(renderer):
    rows = demonstrations(10)
    alone = Tokenizer(rows, renderer, LossMask(), 48)
    alone.prepare(list(range(10)))
    shares = [[alone.make(rows[index]) for index in share] for share in shares_of(list(range(10)), 3)]
    shared = Tokenizer(rows, renderer, LossMask(), 48, Peers(0, 3, lambda own: [own, *shares[1:]]))
    shared.prepare(list(range(10)))
    for index in range(10):
        np.testing.assert_array_equal(shared[index].input_ids, alone[index].input_ids)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": [1]}, "message 1 has content of type 'int'"),
        ({"role": None, "content": "x"}, "column 'messages': message 1 has the unknown role None"),
        (
            {"role": "asistant", "content": "x"},
            "message 1 has the unknown role 'asistant'; the roles are system",
        ),
    ],
)
def test_a_row_that_the_renderer_cannot_render_is_named(renderer, message, expected):
    rows = rows_of({"prompt": "p", "completion": "c"}, {"messages": [message]})
    with pytest.raises(DataError, match=rf"data\.jsonl:2: .*{expected}"):
        Tokenizer(rows, renderer, LossMask(), 64).prepare([0, 1])


def test_a_row_that_the_template_refuses_is_named(chat_tokenizer):
    template = (
        "{% if messages[0].content == 'oracle' %}{{ raise_exception('no oracles') }}{% endif %}" + CHATML
    )
    oracle = {"messages": [{"role": "system", "content": "oracle"}, *TURNS["messages"]]}
    with pytest.raises(DataError, match=r"data\.jsonl:1: the row cannot be rendered \(\w+: no oracles\)"):
        by_template(chat_tokenizer, template, oracle)


def test_a_damaged_parquet_file_is_named(tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "none.parquet").write_bytes(b"none")
    table = pyarrow.table({"prompt": [f"{each:05}" for each in range(9999)]})
    pyarrow.parquet.write_table(table, tmp_path / "cut.parquet")
    whole = (tmp_path / "cut.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:100] + bytes(1000) + whole[1100:])
    for name in ("none", "cut"):
        with pytest.raises(DataError, match=rf"{name}\.parquet: cannot read the Parquet file \("):
            all_values(open_rows(SFTData(path=str(tmp_path / f"{name}.parquet"))))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
@settings(deadline=None)
def test_packing_holds_every_sample_once_and_no_row_overflows(lengths):
    samples = [
        SFTSample(np.full(length, number), np.ones(length, bool)) for number, length in enumerate(lengths)
    ]
    rows = pack_first_fit(samples, 20)
    assert sorted(int(sample.input_ids[0]) for row in rows for sample in row) == list(range(len(lengths)))
    assert all(sum(len(sample.input_ids) for sample in row) <= 20 for row in rows)
    assert len(rows) <= 2 * sum(lengths) / 20 + 1


@pytest.fixture(scope="module")
def chat_tokenizer(renderer):
    return renderer.tokenizer


def test_datasets_saved_to_disk_are_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{"prompt": letter, "completion": letter} for letter in "ab"])
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(str(tmp_path / "many"))
    assert [each["prompt"] for each in all_values(open_rows(SFTData(path=str(tmp_path / "one"))))] == [
        "a",
        "b",
    ]
    test = open_rows(SFTData(path=str(tmp_path / "many"), split="test"))
    assert all_values(test) == [{"prompt": "b", "completion": "b"}]


CARD = """---
configs:
- {config_name: easy, data_files: [{split: train, path: easy/train.jsonl}, {split: test, path: easy/test.jsonl}]}
- {config_name: hard, data_files: [{split: train, path: hard/train.jsonl}]}
---
"""
READ = """
import json, sys
from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.recipe.schema.sft import SFTData
from primerl_hpc.recipe.sft.tables import open_rows
for fields in json.loads(sys.argv[1]):
    try:
        rows = open_rows(SFTData(**fields))
        print(json.dumps([rows[index].values["prompt"] for index in range(len(rows))]))
    except NotFoundError as error:
        print(json.dumps(str(error)))
"""


def online(url: str, home: Path) -> dict[str, str]:
    """The environment of a process that may fetch from the hub at ``url``."""
    hub = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return {**os.environ, **hub, "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}


def test_subsets_and_splits_of_a_dataset_on_the_hub_are_read(tmp_path):
    """Run in a separate process: the hub's address is read once."""

    def rows(letters: str) -> bytes:
        return "".join(f'{{"prompt": "{each}", "completion": "c"}}\n' for each in letters).encode()

    files = {"easy/train.jsonl": rows("abc"), "easy/test.jsonl": rows("d"), "hard/train.jsonl": rows("ef")}
    org = {"path": "org/rows"}
    asked = [
        {**org, "subset": "easy"},
        {**org, "subset": "easy", "split": "test"},
        {**org, "subset": "hard", "num_rows": 1},
        {**org, "subset": "none"},
        {"path": "org/other"},
    ]
    with serve_hub({"org/rows": {"README.md": CARD.encode(), **files}}) as url:
        done = captured(
            [sys.executable, "-c", READ, json.dumps(asked)], env=online(url, tmp_path), check=True
        )
    *found, no_subset, no_dataset = map(json.loads, done.stdout.splitlines())
    assert found == [["a", "b", "c"], ["d"], ["e"]]
    assert "dataset 'org/rows' exists neither here nor on the hub" in no_subset and "none" in no_subset
    assert "dataset 'org/other' exists neither here nor on the hub" in no_dataset


READ_AS_RANKS = """
import sys
import huggingface_hub.constants
import torch
import torch.distributed as dist
from datasets import load_dataset
from torch.multiprocessing import start_processes
from primerl_hpc.common.node.exiting import exit_process
from primerl_hpc.recipe.schema.layout import TrainerLayout
from primerl_hpc.recipe.schema.sft import SFTData
from primerl_hpc.trainer.parallel.mesh import make_world
from primerl_hpc.trainer.sft_loop import open_source
def read(rank, store):
    huggingface_hub.constants.HF_HUB_USER_AGENT_ORIGIN = f"rank-{rank}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    world = make_world(TrainerLayout(), torch.device("cpu"), local_rank=rank, local_size=2)
    assert len(open_source(SFTData(path="org/rows"), world)) == 1
    dist.destroy_process_group()
    exit_process()
start_processes(read, (sys.argv[1],), nprocs=2, start_method="fork")
"""
"""The ranks fork, because these imports take most of their time."""


def test_one_rank_of_a_node_fetches_from_the_hub_before_the_others(tmp_path):
    pytest.importorskip("torch")
    agents: list[str] = []
    files = {"train.jsonl": b'{"prompt": "a", "completion": "b"}\n'}
    with serve_hub({"org/rows": files}, agents) as url:
        done = subprocess.run(
            [sys.executable, "-c", READ_AS_RANKS, str(tmp_path / "store")],
            env=online(url, tmp_path),
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0
    asked = ["rank-0" if "rank-0" in agent else "rank-1" for agent in agents]
    assert set(asked) == {"rank-0", "rank-1"}
    assert asked == sorted(asked)


TOOL = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}
WRAPPED = {"type": "function", "function": TOOL}


@pytest.mark.parametrize(
    "values",
    [
        {"tools": [WRAPPED]},
        {"tool_defs": [TOOL]},
        {"tools": json.dumps([TOOL])},
        {"tools": None, "tool_defs": json.dumps([WRAPPED])},
        {"tools": [{**TOOL, "parameters": json.dumps(TOOL["parameters"]), "strict": None}]},
    ],
)
def test_tools_come_in_many_shapes_and_leave_in_one(values):
    assert row_tools(rows_of(values)[0]) == [WRAPPED]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"tools": "no json"}, "column 'tools' holds text that is not valid JSON"),
        ({"tools": {"name": "x"}}, "column 'tools' must hold a list of tools"),
        ({"tool_defs": [{"nam": "x"}]}, "column 'tool_defs': a tool must be a mapping with name"),
    ],
)
def test_tools_that_are_none_are_refused_by_row_and_column(values, expected):
    with pytest.raises(DataError, match=rf"data\.jsonl:1: {expected}"):
        row_tools(rows_of(values)[0])


def template_tokenizer(chat_tokenizer, template: str):
    """The tiny tokenizer with another chat template."""
    other = copy.deepcopy(chat_tokenizer)
    other.chat_template = template
    return other


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if shout is defined %}!{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# like templates that keep the reasoning of the last reply only
UNSTABLE = CHATML.replace(
    "{{ m.content }}", "{% if loop.last and m.role == 'assistant' %}#{% endif %}{{ m.content }}"
)
TURNS = {
    "messages": [
        {"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)
    ]
}


def by_template(chat_tokenizer, template: str, values: dict, mask: LossMask | None = None) -> str:
    model = Model(name="tiny", renderer={"name": "default"})
    text_tokenizer = template_tokenizer(chat_tokenizer, template)
    tokenizer = Tokenizer(
        rows_of(values),
        make_renderer(model, text_tokenizer),
        mask or LossMask(),
        128,
        make_renderer=lambda kwargs: make_renderer(model, text_tokenizer, kwargs),
    )
    tokenizer.prepare([0])
    sample = tokenizer[0]
    return text_tokenizer.decode(sample.input_ids[sample.is_trained])


def test_a_chat_template_trains_replies_and_their_stop_without_scaffold(chat_tokenizer):
    assert by_template(chat_tokenizer, CHATML, TURNS) == "b<|im_end|>d<|im_end|>"


def test_template_settings_of_a_row_reach_the_template(chat_tokenizer, renderer):
    row = {**TURNS, "chat_template_kwargs": json.dumps({"shout": True, "unset": None})}
    model = Model(name="tiny", renderer={"name": "default"})
    text_tokenizer = template_tokenizer(chat_tokenizer, CHATML)
    tokenizer = Tokenizer(
        rows_of(row, TURNS),
        make_renderer(model, text_tokenizer),
        LossMask(),
        128,
        make_renderer=lambda kwargs: make_renderer(model, text_tokenizer, kwargs),
    )
    tokenizer.prepare([0, 1])
    shouted, plain = (text_tokenizer.decode(tokenizer[index].input_ids) for index in (0, 1))
    assert "!b" in shouted and "!" not in plain
    with pytest.raises(DataError, match=r"data\.jsonl:1: column 'chat_template_kwargs'.*shout"):
        Tokenizer(rows_of(row), renderer, LossMask(), 64).prepare([0])


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_row(chat_tokenizer):
    with pytest.raises(DataError, match=r"data\.jsonl:1: the chat template renders .* turn 2 differently"):
        by_template(chat_tokenizer, UNSTABLE, TURNS)
    one_turn = {"messages": TURNS["messages"][:2]}
    assert by_template(chat_tokenizer, UNSTABLE, one_turn).endswith("#b<|im_end|>")
    with pytest.raises(ConfigError, match="cannot identify the text of user turns"):
        by_template(chat_tokenizer, CHATML, TURNS, LossMask(user=True))


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": "{}"}}],
}
CALLING = {"messages": [{"role": "user", "content": "u"}, CALL]}
SHOWS_TOOLS = "{% if tools %}tools{% endif %}" + CHATML
SHOWS_CALLS = CHATML.replace("{{ m.content }}", "{{ m.content }}{% if m.tool_calls %}calls{% endif %}")


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({**TURNS, "tools": [TOOL]}, "tools"),
        (CALLING, "tool_calls in message 2"),
        ({**CALLING, "tool_defs": [TOOL]}, "tools"),
    ],
)
def test_tools_are_refused_with_the_row_where_the_renderer_has_none(renderer, values, parts):
    rows = rows_of(TURNS, values)
    with pytest.raises(
        DataError, match=rf"data\.jsonl:2: the row has {parts}, which renderer 'chatml' does not render"
    ):
        Tokenizer(ConcatenatedRows([rows]), renderer, LossMask(), 64).prepare([0, 1])


def test_tools_are_refused_with_the_row_where_the_chat_template_leaves_them_out(chat_tokenizer):
    both = {**CALLING, "tools": [TOOL]}
    for template, dropped in (
        (CHATML, "tools"),
        (SHOWS_CALLS, "tools"),
        (SHOWS_TOOLS, "tool_calls in message 2"),
    ):
        with pytest.raises(
            DataError, match=rf"data\.jsonl:1: the row has {dropped}, which the tokenizer's chat template"
        ):
            by_template(chat_tokenizer, template, both)
    whole = SHOWS_TOOLS.replace(CHATML, SHOWS_CALLS)
    assert by_template(chat_tokenizer, whole, both) == "calls<|im_end|>"


def test_rows_that_are_cut_or_skipped_are_counted_once_and_after_a_resume(renderer):
    rows = rows_of(
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "completion": "b" * 99},  # cut, its beginning is trained
        {"prompt": "a" * 99, "completion": "b"},  # cut before its reply
        {"messages": [{"role": "user", "content": "u"}]},
    )
    config = SFT(data=SFTData(path="x"), batch_size=1, shuffle=False)
    stream = SFTStream(Tokenizer(rows, renderer, LossMask(), 32), config, seq_len=32, seed=0)
    first = stream.next_batch().metrics  # the second row does not fit any more, and is given back
    assert (first["progress/num_cut"], first["progress/num_skipped"]) == (0, 0)
    assert stream.row_counts.summary("1 row") == ""
    second = stream.next_batch().metrics
    assert (second["progress/num_cut"], second["progress/num_skipped"]) == (1, 2)
    assert stream.row_counts.summary(f"{stream.position} rows") == (
        "of 4 rows, 1 cut at seq_len (first: data.jsonl:2) and "
        "2 skipped without a trained token (first: data.jsonl:3)"
    )
    assert stream.progress == {"order": 2, "position": 4, "num_cut": 1, "num_skipped": 2}
    third = stream.next_batch().metrics
    assert (third["progress/num_cut"], third["progress/total_cut"], third["progress/total_skipped"]) == (
        0,
        1,
        2,
    )


def test_validation_rows_are_counted_and_one_must_be_trained(renderer):
    rows = rows_of({"prompt": "a", "completion": "b"}, {"messages": [{"role": "user", "content": "u"}]})
    packed, row_counts = all_rows(Tokenizer(rows, renderer, LossMask(), 32), 32, "held-out.jsonl")
    assert (len(packed), row_counts.num_skipped, row_counts.first_skipped) == (1, 1, "data.jsonl:2")
    with pytest.raises(DataError, match=r"held-out\.jsonl: no row has a token to train on"):
        all_rows(Tokenizer(rows[1:], renderer, LossMask(), 32), 32, "held-out.jsonl")


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
    st.data(),
)
@settings(deadline=None)
def test_an_epoch_of_a_mixture_ends_by_its_rule_and_yields_every_sample_that_it_must(
    sizes, to_last, shuffle, seed, data
):
    weights = data.draw(st.lists(st.floats(0.2, 1.0), min_size=len(sizes), max_size=len(sizes)))
    mixture = Mixture(tuple(sizes), shares(weights), ends_with_last=to_last, shuffle=shuffle, seed=seed)
    rows = mixture.order(0)
    ends = np.cumsum(sizes)
    counts = np.bincount(np.searchsorted(ends, rows, side="right"), minlength=len(sizes))
    distinct = [len({row for row in rows if ends[i] - size <= row < ends[i]}) for i, size in enumerate(sizes)]
    is_whole = [count >= size for count, size in zip(counts, sizes, strict=True)]
    assert all(is_whole) if to_last else any(is_whole)
    assert distinct == [min(count, size) for count, size in zip(counts, sizes, strict=True)]
    shorter = np.bincount(np.searchsorted(ends, rows[:-1], side="right"), minlength=len(sizes))
    was_whole = [count >= size for count, size in zip(shorter, sizes, strict=True)]
    assert not (all(was_whole) if to_last else any(was_whole))


def test_a_mixture_keeps_its_shares_and_its_place(renderer):
    order = Order(Mixture((40, 400), (0.75, 0.25), seed=3))
    rows = [order.row(position) for position in range(4000)]
    assert np.mean(np.array(rows) < 40) == pytest.approx(0.75, abs=0.03)
    other = Order(Mixture((40, 400), (0.75, 0.25), seed=3))
    assert [other.row(position) for position in (3999, 0, 1700)] == [rows[3999], rows[0], rows[1700]]
    lengths = [len(order.mixture.order(epoch)) for epoch in range(2)]
    assert order.epochs(lengths[0]) == 1.0 and order.epochs(lengths[0] + lengths[1] // 2) < 2


def test_batches_of_a_mixture_tell_the_share_of_each_source(renderer):
    sources = (SFTData(path="a.jsonl", probability=3), SFTData(path="b.jsonl", probability=1))
    config = SFT(data=sources, batch_unit="samples", batch_size=200)
    parts = [demonstrations(30), demonstrations(50)]
    tokenizer = Tokenizer(ConcatenatedRows(parts), renderer, LossMask(), 48)
    stream = SFTStream(tokenizer, config, seq_len=48, seed=1, sizes=(30, 50))
    metrics = stream.next_batch().metrics
    assert metrics["progress/a/ratio_samples"] == pytest.approx(0.75, abs=0.1)
    assert sum(metrics[f"progress/{name}/ratio_tokens"] for name in "ab") == pytest.approx(1)


def test_samples_are_forgotten_when_too_many_are_kept(renderer, monkeypatch):
    monkeypatch.setattr(sft_tokens, "KEPT_TOKENS", 100)
    tokenizer = Tokenizer(demonstrations(60), renderer, LossMask(), 48)
    for start in range(0, 60, 10):
        tokenizer.prepare(list(range(start, start + 10)))
        assert all(len(tokenizer[index].input_ids) for index in range(start, start + 10))
    assert len(tokenizer._samples) < 30


def test_sources_must_fit_together():
    with pytest.raises(ValueError, match="every source a probability, or none"):
        SFT(data=[{"path": "a.jsonl", "probability": 1}, {"path": "b.jsonl"}])
    with pytest.raises(ValueError, match="two sources are called 'a'"):
        SFT(data=[{"path": "x/a.jsonl"}, {"path": "y/a.jsonl"}])
