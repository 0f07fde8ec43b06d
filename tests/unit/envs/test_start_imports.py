"""Imports of processes that load environments: libraries that they leave out until they are needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from primerl_hpc.envs.tools import package_mentions
from primerl_hpc.recipe.schema.rollout import Environment
from tests.support.helpers import TOY_RECIPE, make_tiny_model

DEFERRED = """
import sys
from primerl_hpc.envs.check import check_environment
from primerl_hpc.recipe.schema.rollout import Environment
assert check_environment(Environment(id="reverse-text")).num_tasks  # it defers imports before its own
import verifiers.v1
from verifiers.v1.dialects import anthropic as dialect
from verifiers.v1.utils import score

from primerl_hpc.envs import expose_shipped
from verifiers.v1.utils import loaders
expose_shipped()
assert loaders.import_taskset("reverse-text").__name__ == "reverse_text"
assert not {"anthropic._client", "sympy", "verifiers.v1.tasksets.harbor"} & set(sys.modules)
usage = {"input_tokens": 1, "output_tokens": 2}
text = {"content": [{"type": "text", "text": "x"}], "role": "assistant", "type": "message", "usage": usage}
message = dialect.ModdedAnthropicMessage.model_validate({"id": "1", "model": "m", **text})
assert type(message.content[0]).__name__ == "TextBlock"

assert score.parse("$3$") == [3, "3"]  # the function that verifiers has imported
import anthropic, math_verify
assert anthropic.AsyncAnthropic.__module__ == "anthropic" and math_verify.parse is not score.parse
assert anthropic.types.Message is dialect.AnthropicMessage
from anthropic.types import *
from verifiers.v1.tasksets import HarborTaskset
from verifiers.v1 import tasksets
assert tasksets.NeMoGymTaskset in vars(tasksets).values()
for package in (anthropic, anthropic.types, math_verify, tasksets):
    assert "Deferred" not in type(package).__name__ and "deferred" not in type(package.__loader__).__module__
"""
TOKENIZER = """
import json, sys
from primerl_hpc.envs.serving.tokenizers import load_tokenizers
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.renderer import make_renderer
from renderers import base

recipe = Recipe.model_validate(json.loads(sys.argv[1]))
model = recipe.model
policy, judge = load_tokenizers(recipe)
copies = [base.load_tokenizer(model.name) for _ in range(2)]
assert judge is None and copies[0] is not copies[1]
messages = [{"role": "user", "content": "hello"}]
ids = [make_renderer(model, known).render_ids(messages) for known in (policy, *copies)]
assert not {"torch", "transformers"} & {name.partition(".")[0] for name in sys.modules}
assert ids == ids[:1] * 3, ids
from transformers.utils import is_torch_available
assert is_torch_available()  # an environment's own import is complete
"""


def test_libraries_that_verifiers_rarely_needs_are_imported_when_they_are_used() -> None:
    subprocess.run([sys.executable, "-c", DEFERRED], check=True)


def test_an_environment_server_loads_tokenizers_without_torch(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path, rows=1, hidden=32, layers=1) / "model"
    recipe = {**TOY_RECIPE, "model": {"name": str(source), "renderer": {"name": "chatml"}}}
    subprocess.run([sys.executable, "-c", TOKENIZER, json.dumps(recipe)], check=True)


def test_the_text_of_a_package_is_searched_without_importing_verifiers() -> None:
    script = (
        "import sys; from primerl_hpc.envs.tools import package_mentions;"
        "from primerl_hpc.recipe.schema.rollout import Environment;"
        "assert not package_mentions(Environment(id='reverse-text'), 'toolsets');"
        "assert package_mentions(Environment(id='harbor'), 'Toolset');"
        "assert not any(name.startswith('verifiers') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert package_mentions(Environment(id="calculator"), "toolsets")
