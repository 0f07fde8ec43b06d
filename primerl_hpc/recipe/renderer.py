"""The renderer that a recipe selects, as a config of package ``renderers``. Heavy imports happen inside the
functions."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from types import ModuleType
from typing import Any

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import Kind
from primerl_hpc.common.validate import nearest
from primerl_hpc.recipe.schema.model import Model
from primerl_hpc.recipe.schema.recipe import Recipe

OWN_RENDERERS = {"chatml": "primerl_hpc.recipe.chatml.ChatMLRenderer"}
"""Renderers of this package: name → import path."""
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
"""Special tokens of renderer ``chatml``: start and end of a message."""
WITHOUT_TOOLS = ("chatml",)
"""Names of renderers that do not render tools."""
COMPARISON = "primerl_hpc.recipe.template_comparison:compare"
"""Function that compares a renderer with the chat template, in an interpreter that has both."""
LITERAL = "primerl_hpc.recipe.literal_renderer.LiteralRenderer"


def renderer_config(model: Model) -> dict[str, Any]:
    """Return ``{"name": "custom", "import_path": …}``, an input of the config union of package ``renderers``.

    A renderer of that package is wrapped in `LITERAL`, so that message text never becomes a control token.
    """
    name, options = model.renderer.name, dict(model.renderer.options)
    if name in OWN_RENDERERS:
        return {"name": "custom", "import_path": OWN_RENDERERS[name], **options}
    return {"name": "custom", "import_path": LITERAL, "inner": {"name": name, **options}}


def make_renderer(model: Model, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return a renderer for ``tokenizer``, with a conversation's ``chat_template_kwargs`` on top of the recipe's
    options.

    Raises ConfigError if ``auto`` finds no family for the model, if the family needs tokens that the tokenizer lacks,
    or if it does not have one of the template settings.
    """
    import renderers

    config = _typed_config(model)
    try:
        renderer = renderers.create_renderer(tokenizer, config, chat_template_kwargs=template_kwargs)
    except (AssertionError, ValueError) as error:
        raise ConfigError(
            f"renderer '{model.renderer.name}' does not fit the tokenizer of {model.name}: {error}",
            hint="set model.renderer.name to the model's family",
        ) from error
    if model.renderer.name == "auto" and type(renderer).__name__ == "DefaultRenderer":
        raise _no_renderer(model)
    return renderer


def check_renderer(model: Model) -> None:
    """Check ``model.renderer`` as far as possible without the tokenizer. Needs package ``renderers``.

    Raises ConfigError for an unknown name or option, and for ``auto`` if it finds no renderer.
    """
    name = model.renderer.name
    if name in OWN_RENDERERS and not model.renderer.options:
        return
    if name == "custom" or name in OWN_RENDERERS:  # their modules import the complete package
        _typed_config(model)
        return
    with _without_client():
        from renderers.base import MODEL_RENDERER_MAP
        from renderers.configs import RendererConfig

        _validate(model, RendererConfig, {"name": name, **model.renderer.options})
        if name == "auto" and (model.tokenizer or model.name) not in MODEL_RENDERER_MAP:
            raise _no_renderer(model)


@contextmanager
def _without_client() -> Iterator[None]:
    """Import modules of package ``renderers`` without its ``__init__``, and forget them afterwards.

    The ``__init__`` imports the OpenAI client, which takes 0.8 s: a quarter of a plan.
    """
    spec = None if "renderers" in sys.modules else importlib.util.find_spec("renderers")
    if spec is None or spec.submodule_search_locations is None:
        yield
        return
    package = ModuleType("renderers")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["renderers"] = package
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "renderers"]:
            del sys.modules[name]


def uses_renderer(recipe: Recipe) -> bool:
    """True if a process of the run converts messages to tokens itself; an external server receives messages."""
    return recipe.kind in (Kind.RL, Kind.SFT) or (recipe.kind == Kind.EVAL and not recipe.is_external)


def check_auto(model: Model) -> None:
    """Raise ConfigError for ``auto`` with a model folder, because only hub names can be looked up."""
    source = model.tokenizer or model.name
    if model.renderer.name == "auto" and PurePath(source).is_absolute():
        raise ConfigError(
            f"model.renderer.name: auto looks up models by hub name, but {source} is a folder",
            hint="set model.renderer.name to the model's family: qwen3, llama-3, gpt-oss, … or chatml",
        )


def _no_renderer(model: Model) -> ConfigError:
    return ConfigError(
        f"no renderer is known for model {model.name}",
        hint="set model.renderer.name to its family, for example qwen3, llama-3 or chatml",
    )


def _typed_config(model: Model) -> Any:
    """Return the typed config of package ``renderers``. Raises ConfigError for an unknown name or option."""
    import renderers

    if model.renderer.name not in OWN_RENDERERS:  # The wrapper would accept any option.
        _validate(model, renderers.RendererConfig, {"name": model.renderer.name, **model.renderer.options})
    return _validate(model, renderers.RendererConfig, renderer_config(model))


def _validate(model: Model, union: Any, config: dict[str, Any]) -> Any:
    from pydantic import TypeAdapter, ValidationError

    adapter: TypeAdapter[Any] = TypeAdapter(union)
    try:
        return adapter.validate_python(config)
    except ValidationError as error:
        raise _as_config_error(model, error.errors()[0]) from error


def _as_config_error(model: Model, fault: Mapping[str, Any]) -> ConfigError:
    name = model.renderer.name
    if fault["type"] == "union_tag_invalid":
        expected = str(fault["ctx"]["expected_tags"]).replace("'", "").split(", ")
        known = [*OWN_RENDERERS, *(tag for tag in expected if tag != "custom")]
        near = nearest(name, known)
        hint = f"did you mean '{near}'? " if near else ""
        return ConfigError(
            f"model.renderer.name: there is no renderer '{name}'", hint=f"{hint}known: {', '.join(known)}"
        )
    option = ".".join(str(part) for part in fault["loc"][1:])
    if fault["type"] == "extra_forbidden":
        return ConfigError(
            f"model.renderer.options: renderer '{name}' has no option '{option}'",
            hint="its options are the fields of its config class in package renderers",
        )
    message = fault["msg"].removeprefix("Value error, ")
    return ConfigError(
        f"model.renderer.options{f'.{option}' if option else ''} of renderer '{name}': {message}"
    )


def load_tokenizer(model: Model) -> Any:
    """Return the tokenizer of the model, loaded by transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        model.tokenizer or model.name, trust_remote_code=model.trust_remote_code
    )
