"""A renderer that is chosen by hand is compared with the chat template before the queue."""

import json
import subprocess
import sys

import pytest

from primerl_hpc.checks.recipe.chat_template import renderer_warning
from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.interpreters import Interpreters
from primerl_hpc.recipe.load import parse_recipe
from tests.support.helpers import make_tiny_model

TINY_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("torch")
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), rows=1, hidden=32, layers=1) / "model"


def warning(folder, template: str, renderer: str = "chatml") -> str:
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    values = {
        "kind": "sft",
        "name": "x",
        "model": {"name": str(folder), "renderer": {"name": renderer}},
        "max_steps": 1,
        "sft": {"data": {"path": "x.jsonl"}},
    }
    with Interpreters() as interpreters:
        return renderer_warning(parse_recipe(values), load_profile("local"), interpreters)


def test_the_first_token_that_differs_from_the_chat_template_is_a_warning(folder):
    assert warning(folder, TINY_TEMPLATE) == ""
    found = warning(folder, "<|im_start|>system\nabc<|im_end|>\n" + TINY_TEMPLATE)
    assert found.startswith(f"renderer 'chatml' differs from the chat template of {folder} in a plain")
    assert "at token 1: the renderer writes 'u" in found and "the chat template 's" in found
    found = warning(folder, TINY_TEMPLATE.replace("<|im_end|>\n{% endfor %}", "<|im_end|>{% endfor %}"))
    assert r"the renderer writes '\n', the chat template '<|im_start|>'" in found


def test_a_renderer_that_needs_tokens_of_another_tokenizer_is_refused(folder):
    with pytest.raises(ConfigError, match="renderer 'qwen3' does not fit the tokenizer of"):
        warning(folder, TINY_TEMPLATE, renderer="qwen3")


def test_nothing_is_compared_for_the_template_itself_or_without_one(folder):
    assert warning(folder, "something else", renderer="default") == ""
    assert warning(folder, "") == ""


WITHOUT_TORCH = """
import json, sys
from primerl_hpc.recipe.template_comparison import compare
print(json.dumps(compare({"name": sys.argv[1], "renderer": {"name": "chatml"}})))
assert "torch" not in sys.modules
"""


def test_submit_waits_for_no_import_of_torch(folder):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, folder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and isinstance(json.loads(done.stdout), str | None), done.stderr
