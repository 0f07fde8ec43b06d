"""Keep text that looks like a control token, such as ``<|im_start|>``, from becoming one where only content is allowed.

    find = control_pattern(tokenizer)                       # a compiled pattern of the tokenizer's control tokens
    tokenizer.encode(mark(text, find))                      # by a `LiteralTokenizer`: characters, no control token
    neutralize("<|im_end|>", ANY_CONTROL)                   # "< |im_end|>", for a server with another tokenizer

Added tokens that only mark up a reply (``<think>``, ``<tool_call>``) count as control tokens in tool results only,
because replies of supervised rows contain them on purpose.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MARK = "\ufdd0"
"""A Unicode noncharacter that `mark` inserts after the first character of a control token's text to prevent a match."""
_ESCAPED_MARK = "\\ufdd0"  # as json.dumps writes it
_MARKS = re.compile(f"{MARK}|{re.escape(_ESCAPED_MARK)}")
_MARKUP = re.compile(r"</?[\w:.-]+>")
_MARKUP_NAMES = re.compile(r"</?(think|thinking|thought|reasoning|answer|arg_\w+|tool_\w+|function\w*)>")
_NEVER = re.compile(r"(?!)")

ANY_CONTROL = re.compile(
    r"<[|｜][^<>|｜\s]{1,64}[|｜]?>"  # ChatML, Llama 3, GPT-OSS, DeepSeek, …
    r"|<[\w/]{1,64}[|｜]>"  # Gemma 4
    r"|</?(?:s|bos|eos|pad|unk|sop|eop|start_of_turn|end_of_turn|end_of_utterance)>"
    r"|\[/?(?:INST|SYS|gMASK|BOS|EOS|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|SYSTEM_PROMPT)\]"
    r"|<</?SYS>>"
)
"""Control tokens of common model families, for text whose tokenizer is not known."""


def control_texts(tokenizer: Any, *, with_markup: bool = False) -> list[str]:
    """Return the texts of the tokenizer's control tokens, longest first.

    ``with_markup``: include its other added tokens.
    """
    texts: set[str] = set(getattr(tokenizer, "all_special_tokens", ()))
    for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
        text, is_special = str(token), getattr(token, "special", True)
        is_markup = (not is_special and _MARKUP.fullmatch(text)) or _MARKUP_NAMES.fullmatch(text)
        is_control = (is_special or ANY_CONTROL.fullmatch(text)) and not is_markup
        if is_control or with_markup:
            texts.add(text)
    return sorted((text for text in texts if len(text) > 1 and text.strip()), key=len, reverse=True)


def control_pattern(tokenizer: Any, *, with_markup: bool = False) -> re.Pattern[str]:
    """Return a pattern that matches `control_texts`, or nothing if the tokenizer has none."""
    texts = control_texts(tokenizer, with_markup=with_markup)
    return re.compile("|".join(map(re.escape, texts))) if texts else _NEVER


def has_control_text(text: str) -> bool:
    """True if the text contains a control token of a common model family."""
    return ANY_CONTROL.search(text) is not None


def neutralize(text: str, *patterns: re.Pattern[str]) -> str:
    """Insert a space after the first character of each match, so that no tokenizer matches it."""
    for pattern in patterns:
        text = pattern.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
    return text


def mark(value: Any, pattern: re.Pattern[str]) -> Any:
    """Return ``value`` with a `MARK` in each match within its strings, including strings in lists and mappings."""
    if isinstance(value, str):
        return pattern.sub(lambda found: f"{found[0][0]}{MARK}{found[0][1:]}", value)
    if isinstance(value, Mapping):
        return {mark(key, pattern): mark(item, pattern) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mark(item, pattern) for item in value]
    return value


class LiteralTokenizer:
    """A wrapper around a tokenizer that encodes marked text literally; all other behavior is the tokenizer's.

    Text is split at its marks and encoded part by part. A marked control token is split as well, so no part contains
    it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._patterns = {
            False: control_pattern(tokenizer),
            True: control_pattern(tokenizer, with_markup=True),
        }

    def __getattr__(self, name: str) -> Any:
        if name == "_tokenizer":  # copy and pickle access attributes before they are restored
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def mark(self, value: Any, *, role: str = "") -> Any:
        """Mark control tokens in ``value``; with role ``tool``, markup tokens as well."""
        return mark(value, self._patterns[role == "tool"])

    def mark_messages(self, messages: list[Any]) -> list[Any]:
        """Return messages (mappings or pydantic models) as mappings with marked strings."""
        plain = [
            message if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
            for message in messages
        ]
        return [self.mark(message, role=str(message.get("role"))) for message in plain]

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        parts = _MARKS.split(text) if isinstance(text, str) else [text]
        if len(parts) == 1:
            return self._tokenizer.encode(text, **kwargs)
        return [token for part in parts if part for token in self._tokenizer.encode(part, **kwargs)]

    def __call__(self, text: Any, **kwargs: Any) -> Any:
        """Return ``input_ids`` and, if requested, ``offset_mapping`` into the marked text."""
        if not isinstance(text, str) or not _MARKS.search(text):
            return self._tokenizer(text, **kwargs)
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        start = 0
        for separator in [*_MARKS.finditer(text), None]:
            end = len(text) if separator is None else separator.start()
            if end > start:
                encoding = self._tokenizer(text[start:end], **kwargs)
                ids += encoding["input_ids"]
                offsets += [
                    (start + first, start + last) for first, last in encoding.get("offset_mapping", ())
                ]
            start = end if separator is None else separator.end()
        result: dict[str, Any] = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        return result | ({"offset_mapping": offsets} if kwargs.get("return_offsets_mapping") else {})

    def apply_chat_template(self, messages: Any, *, tokenize: bool = True, **kwargs: Any) -> Any:
        """Like the tokenizer's method; return the list of token ids if ``tokenize`` is true."""
        return_dict = kwargs.pop("return_dict", False)
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
        if not tokenize:
            return text
        ids = self.encode(text, add_special_tokens=False)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)} if return_dict else ids
