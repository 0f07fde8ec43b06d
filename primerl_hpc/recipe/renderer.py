"""Which renderer a recipe means, as the config that package ``renderers`` takes; no heavy import until it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.recipe.model_schema import Model

OURS = {"chatml": "primerl_hpc.common.chatml.ChatMLRenderer"}


def renderer_config(model: Model) -> dict[str, Any]:
    """``{"name": "qwen3", …}`` for renderers' typed union, or ``{"name": "custom", "import_path": …}`` for ours."""
    name, options = model.renderer.name, dict(model.renderer.options)
    if name in OURS:
        return {"name": "custom", "import_path": OURS[name], **options}
    return {"name": name, **options}


def make_renderer(model: Model, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> Any:
    """A renderer for ``tokenizer``, with a conversation's own ``chat_template_kwargs`` on top of the recipe's options.

    Raises ConfigError when ``auto`` finds no family for the model, or the family needs tokens the tokenizer lacks, or
    knows no such template setting.
    """
    import renderers
    from pydantic import TypeAdapter

    config = TypeAdapter(renderers.RendererConfig).validate_python(renderer_config(model))
    try:
        renderer = renderers.create_renderer(tokenizer, config, chat_template_kwargs=template_kwargs)
    except (AssertionError, ValueError) as error:
        raise ConfigError(
            f"renderer '{model.renderer.name}' does not fit the tokenizer of {model.name}: {error}",
            mend="set model.renderer.name to the model's family",
        ) from error
    if model.renderer.name == "auto" and type(renderer).__name__ == "DefaultRenderer":
        raise ConfigError(
            f"no renderer is known for model {model.name}",
            mend="set model.renderer.name to its family, e.g. qwen3, llama-3 or chatml",
        )
    return renderer


def load_tokenizer(model: Model) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        model.tokenizer or model.name, trust_remote_code=model.trust_remote_code
    )
