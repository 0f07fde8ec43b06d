"""Refuse rows whose tokens would not be what their author meant.

checks = RowChecks(vocab_size=151_936, ignored_keys=("id",))
checks.check_parts(renderer, row, messages, tools)      # raises DataError if the renderer drops a part of the row
checks.check_ids(row, ids)                              # raises DataError for an id without an embedding
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from primerl_hpc.common.errors import DataError
from primerl_hpc.recipe.sft.rows import Row, meaningful_keys, not_rendered


class RowChecks:
    """Checks the rows of one data source. Remembers which parts a typed renderer was seen to render."""

    def __init__(self, vocab_size: int | None = None, ignored_keys: Collection[str] = ()) -> None:
        """``vocab_size``: number of the model's embeddings; None: ids are not checked.

        ``ignored_keys``: keys of messages that need not have an effect on the tokens.
        """
        self.vocab_size, self.ignored_keys = vocab_size, ignored_keys
        self._rendered: set[tuple[int, str, str]] = set()  # renderer, role and key

    def check_ids(self, row: Row, ids: list[int]) -> None:
        """Raise DataError if the model has no embedding for one of the row's token ids."""
        if self.vocab_size is not None and max(ids, default=0) >= self.vocab_size:
            raise DataError(
                f"the row has token id {max(ids)}, but the model has {self.vocab_size} embeddings",
                location=row.location,
                hint="set model.tokenizer to the tokenizer of the model, or enlarge the model's embeddings",
            )

    def check_parts(
        self, renderer: Any, row: Row, messages: list[Any], tools: list[dict[str, Any]] | None
    ) -> None:
        """Raise DataError if the renderer would drop the row's tools or a key of a message without an error.

        A part is dropped if the tokens are the same without it. Each message is rendered as the last one, because
        formats leave out the reasoning of earlier turns. A typed renderer renders a key of a role always or never; what
        a template does may depend on the row.
        """
        name = name_of(renderer)
        if tools and self._is_new(renderer, "", "tools"):
            rendered = _renders(renderer, messages, tools)
            if rendered is not None and rendered == _renders(renderer, messages, None):
                raise not_rendered(row, "tools", name)
            self._rendered.add((id(renderer), "", "tools"))
        for turn, message in enumerate(messages):
            for key in meaningful_keys(message, self.ignored_keys):
                if not self._is_new(renderer, message["role"], key):
                    continue
                without = {other: value for other, value in message.items() if other != key}
                rendered = _renders(renderer, messages[: turn + 1], tools)
                if rendered is not None and rendered == _renders(
                    renderer, [*messages[:turn], without], tools
                ):
                    raise not_rendered(row, f"{key} in message {turn + 1}", name)
                self._rendered.add((id(renderer), message["role"], key))

    def _is_new(self, renderer: Any, role: str, key: str) -> bool:
        return is_template(renderer) or (id(renderer), role, key) not in self._rendered


def is_template(renderer: Any) -> bool:
    """True for a renderer that only wraps the tokenizer's chat template."""
    return type(renderer).__name__ == "DefaultRenderer"


def name_of(renderer: Any) -> str:
    """Return the description of a renderer for messages."""
    return "the tokenizer's chat template" if is_template(renderer) else f"renderer '{renderer.config.name}'"


def _renders(renderer: Any, messages: list[dict[str, Any]], tools: Any) -> list[int] | None:
    """Return the tokens; None if the template fails: then it needs what was removed."""
    from jinja2 import TemplateError

    try:
        return renderer.render_ids(messages, tools=tools)
    except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None
