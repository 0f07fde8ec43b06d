"""A reply ends at any token at which the engine may have stopped, and the next turn has one end token."""

import json

import pytest

from primerl_hpc.recipe.renderer import make_renderer
from primerl_hpc.recipe.schema.model import Model
from tests.support.helpers import make_tiny_model

ENDS = ["<|im_end|>", "<|endoftext|>", "<|other_end|>"]


@pytest.fixture(scope="module")
def text_tokenizer(tmp_path_factory):
    """A tokenizer whose engine stops at three tokens, as `generation_config.json` of base models lists them."""
    pytest.importorskip("torch")
    from transformers import AutoTokenizer

    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), rows=1, hidden=32, layers=1) / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ENDS[1:], "eos_token": "<|endoftext|>"})
    tokenizer.save_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|other_end|>"])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", ["chatml", "default"])
def test_a_reply_has_no_token_at_which_the_engine_stopped(text_tokenizer, name, end):
    renderer = make_renderer(Model.model_validate({"name": "x", "renderer": {"name": name}}), text_tokenizer)
    end_id = text_tokenizer.convert_tokens_to_ids(end)
    reply = [*text_tokenizer.encode("ab", add_special_tokens=False), end_id]
    assert renderer.parse_response(reply).content == "ab"
    assert end_id in renderer.get_stop_token_ids()


@pytest.mark.parametrize("end", [*ENDS, None])
def test_the_next_turn_of_chatml_has_one_end_token(text_tokenizer, end):
    renderer = make_renderer(
        Model.model_validate({"name": "x", "renderer": {"name": "chatml"}}), text_tokenizer
    )
    prompt = renderer.render_ids([{"role": "user", "content": "a"}], add_generation_prompt=True)
    reply = text_tokenizer.encode("b" + (end or ""), add_special_tokens=False)
    bridged = renderer.bridge_to_next_turn(prompt, reply, [{"role": "user", "content": "c"}]).token_ids
    expected = "b" + (end or "<|im_end|>") + "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    assert bridged[: len(prompt)] == prompt and text_tokenizer.decode(bridged[len(prompt) :]) == expected


def test_a_renderer_that_does_not_know_the_engines_stop_token_renders_again_instead_of_adding_its_own():
    from primerl_hpc.recipe.literal_renderer import _marking

    class Known:
        """A renderer with one stop token, 1."""

        def get_stop_token_ids(self):
            return [1]

        def parse_response(self, token_ids, *, tools=None):
            return token_ids

        def bridge_to_next_turn(self, prompt_ids, completion_ids, new_messages, *, tools=None):
            return [*completion_ids, *([] if completion_ids[-1] == 1 else [1])]

        def mark_messages(self, messages):
            return messages

        def mark(self, tools):
            return tools

    renderer = _marking(Known)()
    renderer.literal_tokenizer, renderer.extra_stops = renderer, [2]
    assert renderer.get_stop_token_ids() == [1, 2]
    assert renderer.parse_response([5, 2], tools=None) == [5]
    bridges = [renderer.bridge_to_next_turn([7], reply, []) for reply in ([5, 1], [5], [5, 2])]
    assert bridges == [[5, 1], [5, 1], None]
