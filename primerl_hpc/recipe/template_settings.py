"""The ``chat_template_kwargs`` that a model's chat template uses; a data row or a request may set no others.

template_settings(tokenizer)                                # frozenset({"enable_thinking"})
check_template_kwargs(tokenizer, {"chat_template": "…"})    # ValueError: the name would replace the template
"""

from __future__ import annotations

from typing import Any, ClassVar

_CONVERSATION_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables of a chat template that hold the conversation itself."""


def template_settings(tokenizer: Any) -> frozenset[str]:
    """Return the names that ``chat_template_kwargs`` may set: free variables of the template, except the
    conversation's."""
    from jinja2 import TemplateSyntaxError, meta
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag ``{% generation %}``, which marks replies; transformers defines it."""

        tags: ClassVar[set[str]] = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    templates = getattr(tokenizer, "chat_template", None) or ""
    environment = ImmutableSandboxedEnvironment(extensions=[Generation, loopcontrols])
    names: set[str] = set()
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        try:
            names |= meta.find_undeclared_variables(environment.parse(template))
        except TemplateSyntaxError:  # This template cannot be rendered either.
            continue
    own = _CONVERSATION_VARIABLES | set(environment.globals) | {"raise_exception", "strftime_now"}
    return frozenset(names - own - set(getattr(tokenizer, "special_tokens_map", ())))


def check_template_kwargs(tokenizer: Any, kwargs: dict[str, Any]) -> None:
    """Raise ValueError if the tokenizer's chat template does not use one of the settings."""
    allowed = template_settings(tokenizer)
    if unknown := sorted(set(kwargs) - allowed):
        known = f"it uses {', '.join(sorted(allowed))}" if allowed else "it uses none"
        raise ValueError(f"the chat template does not use {', '.join(unknown)}; {known}")
