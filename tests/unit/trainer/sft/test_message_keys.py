"""Everything that a message of a supervised row contains is rendered, obeyed, or refused by file and row."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from primerl_hpc.common.errors import DataError
from primerl_hpc.recipe.renderer import make_renderer
from primerl_hpc.recipe.schema.model import Model
from primerl_hpc.recipe.schema.sft import LossMask
from primerl_hpc.recipe.sft.rows import NOT_RENDERED, SYSTEM, TOOLS, TRAINED, Row, check_row, row_messages
from primerl_hpc.trainer.sft.checks import RowChecks
from primerl_hpc.trainer.sft.tokens import SFTSample, Tokenizer
from tests.security.test_control_tokens import RENDERERS, tokenizer_with

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = [{"name": "add", "parameters": {}}]
KEYS: dict[str, Any] = {
    "reasoning_content": "because",
    "reasoning": "because",
    "thinking": "because",
    "tool_calls": [CALL],
    "name": "ann",
    "refusal": "no",
    "annotations": [{"url": "x"}],
    "audio": {"id": "a"},
    "id": 7,
    "prefix": True,
}


@pytest.fixture(scope="module")
def text_tokenizer() -> Any:
    return tokenizer_with()


def sample_of(
    text_tokenizer: Any, name: str, messages: list[dict[str, Any]], *, ignored: Any = (), **more: Any
) -> SFTSample:
    model = Model(name="tiny", renderer={"name": name})
    rows: Any = [Row("data.jsonl:3", {"messages": messages, **more})]  # it has what is read of Rows
    checks = RowChecks(ignored_keys=ignored)
    tokenizer = Tokenizer(rows, make_renderer(model, text_tokenizer), LossMask(), 2048, checks=checks)
    tokenizer.prepare([0])
    return tokenizer[0]


def asked(**reply: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes", **reply}]


@pytest.mark.parametrize("name", RENDERERS)
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("turn", [0, 1])
def test_a_key_changes_the_tokens_or_its_row_is_refused(
    text_tokenizer: Any, name: str, key: str, turn: int
) -> None:
    messages = asked()
    without = sample_of(text_tokenizer, name, messages).input_ids.tolist()
    messages[turn] |= {key: KEYS[key]}
    try:
        assert sample_of(text_tokenizer, name, messages).input_ids.tolist() != without
    except DataError as error:
        assert f"data.jsonl:3: the row has {key} in message {turn + 1}, which" in str(error)
        assert sample_of(text_tokenizer, name, messages, ignored=(key,)).input_ids.tolist() == without


@pytest.mark.parametrize("name", RENDERERS)
@pytest.mark.parametrize("column", [*SYSTEM, *TOOLS, *NOT_RENDERED])
def test_a_column_changes_the_tokens_or_its_row_is_refused(
    text_tokenizer: Any, name: str, column: str
) -> None:
    value = TOOL if column in TOOLS else "be brief"
    without = sample_of(text_tokenizer, name, asked()).input_ids.tolist()
    try:
        assert sample_of(text_tokenizer, name, asked(), **{column: value}).input_ids.tolist() != without
        assert column not in NOT_RENDERED
    except DataError as error:
        assert str(error).startswith("data.jsonl:3: ") and (column in TOOLS or f"'{column}'" in str(error))
        assert column not in SYSTEM
    ignored = sample_of(text_tokenizer, name, asked(), ignored=(column,), **{column: value})
    metadata = sample_of(text_tokenizer, name, asked(), id="x", source="y", score=0.5)
    assert ignored.input_ids.tolist() == metadata.input_ids.tolist() == without


def test_a_system_column_is_the_system_message_and_two_of_them_are_refused(text_tokenizer: Any) -> None:
    brief = [{"role": "system", "content": "be brief"}, *asked()]
    expected = sample_of(text_tokenizer, "qwen3", brief).input_ids.tolist()
    columns = {"system": "be brief", "system_prompt": "be brief"}
    for messages in (brief, asked()):
        assert sample_of(text_tokenizer, "qwen3", messages, **columns).input_ids.tolist() == expected
    split = Row("data.jsonl:3", {"prompt": "q", "completion": "yes", "system": "be brief"})
    assert row_messages(split) == brief
    for values in ({"system": "be long"}, {"system": ["x"]}, {"tools": TOOL, "functions": [{"name": "b"}]}):
        with pytest.raises(
            DataError, match=r"data.jsonl:3: column '(system|functions)'"
        ):  # before the job is queued
            check_row(Row("data.jsonl:3", {"messages": brief, **values}))


def test_a_family_renders_reasoning_and_calls_and_chatml_neither(text_tokenizer: Any) -> None:
    for key in ("reasoning_content", "tool_calls"):
        sample_of(text_tokenizer, "qwen3", asked(**{key: KEYS[key]}))
        with pytest.raises(DataError, match=key):
            sample_of(text_tokenizer, "chatml", asked(**{key: KEYS[key]}))
        with pytest.raises(DataError, match=key):  # before the job is queued
            check_row(Row("data.jsonl:3", {"messages": asked(**{key: KEYS[key]})}), "renderer 'chatml'")


def test_reasoning_of_an_earlier_turn_is_left_out_as_the_family_does(text_tokenizer: Any) -> None:
    messages = [*asked(reasoning_content="first"), *asked(reasoning_content="second")]
    text = text_tokenizer.decode(sample_of(text_tokenizer, "qwen3", messages).input_ids)
    assert "second" in text and "first" not in text


@pytest.mark.parametrize("name", RENDERERS)
@pytest.mark.parametrize("key", TRAINED)
@pytest.mark.parametrize("value", [0, False, 0.0])
def test_a_reply_without_weight_is_context_that_is_not_trained(
    text_tokenizer: Any, name: str, key: str, value: Any
) -> None:
    plain = [*asked(), *asked(content="no")]
    messages = [*asked(**{key: value}), *asked(content="no", **{key: 1})]
    sample, expected = (sample_of(text_tokenizer, name, turns) for turns in (messages, plain))
    assert sample.input_ids.tolist() == expected.input_ids.tolist()
    assert text_tokenizer.decode(expected.input_ids[expected.is_trained]).count("yes") == 1
    trained = text_tokenizer.decode(sample.input_ids[sample.is_trained])
    assert "yes" not in trained and "no" in trained


@pytest.mark.parametrize("value", [0.5, -1, "0", [], "false"])
def test_a_weight_between_none_and_all_is_refused(text_tokenizer: Any, value: Any) -> None:
    with pytest.raises(DataError, match=r"data.jsonl:3: message 2 has weight .*completely \(1 or true\)"):
        sample_of(text_tokenizer, "chatml", asked(weight=value))


@pytest.mark.parametrize("key", TRAINED)
def test_a_row_without_weight_is_not_trained_and_others_are_refused(text_tokenizer: Any, key: str) -> None:
    assert not sample_of(text_tokenizer, "chatml", asked(), **{key: 0}).is_trained.any()
    with pytest.raises(DataError, match=f"data.jsonl:3: the row has {key} 0.5"):
        sample_of(text_tokenizer, "chatml", asked(), **{key: 0.5})
    assert sample_of(text_tokenizer, "chatml", asked(), ignored=(key,), **{key: 0.5}).is_trained.any()


@pytest.mark.parametrize("name", RENDERERS)
def test_parts_of_text_are_text_and_other_parts_are_refused(text_tokenizer: Any, name: str) -> None:
    parts = [{"type": "text", "text": "y"}, {"type": "text", "text": "es"}]
    expected = sample_of(text_tokenizer, name, asked()).input_ids.tolist()
    assert sample_of(text_tokenizer, name, asked(content=parts)).input_ids.tolist() == expected
    for form in ("image_url", "thinking", "input_audio"):
        refused = "the row has images" if form == "image_url" else f"message 2 has content of type '{form}'"
        with pytest.raises(DataError, match=rf"data.jsonl:3: .*{refused}"):
            sample_of(text_tokenizer, name, asked(content=[*parts, {"type": form, form: "x"}]))


def test_links_of_tool_results_need_no_tokens(text_tokenizer: Any) -> None:
    result = {"role": "tool", "content": "2", "tool_call_id": "1", "name": "add"}
    reply = {"role": "assistant", "content": "2"}
    sample_of(text_tokenizer, "qwen3", [*asked(tool_calls=[CALL]), result, reply])
