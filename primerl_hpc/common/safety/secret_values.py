"""Detect environment variables with secrets by their name and the form of their value.

    is_secret("HF_TOKEN", "x")             # True because of the name
    is_secret("X", "hf_" + 34 * "a")       # True: the value has the form of a Hugging Face token
    mask("X=hf_aaaa…")                     # "X=***"

A secret in a recipe or profile would be copied to plan.json, recipe.yaml, reports and W&B, so it is rejected. Variables
are passed by name instead: ``env: {HF_TOKEN: {from: HF_TOKEN}}``.
"""

from __future__ import annotations

import re

_NAMES = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|JWT|AUTH)(_|$)|_KEY$",
    re.IGNORECASE,
)
_NOT_SECRET = re.compile(r"(^|_)TOKEN(S|IZERS?)(_|$)|_FILE$|_PATH$|_DIR$", re.IGNORECASE)
"""TOKENIZERS_PARALLELISM, MAX_TOKENS, and names of files."""
_FORMS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{20,}"
    r"|\bAKIA[0-9A-Z]{16}\b|\bxox[abprs]-[\w-]{10,}|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    r"|\b[a-z][a-z0-9+.-]*://[^/\s:@]+:[^/\s:@]+@"
)
"""Tokens of Hugging Face, OpenAI, GitHub, GitLab, AWS, Slack; JSON web tokens; private keys; a password in a URL."""
MASK = "***"


def is_secret_name(name: str) -> bool:
    return _NAMES.search(name) is not None and _NOT_SECRET.search(name) is None


def is_secret(name: str, value: str) -> bool:
    """True if the variable's name or the form of its value indicates a secret. False for an empty value."""
    return bool(value) and (is_secret_name(name) or _FORMS.search(value) is not None)


def mask_forms(text: str) -> str:
    """Mask everything in ``text`` that has the form of a secret."""
    return _FORMS.sub(MASK, text)


def mask(text: str) -> str:
    """Mask secrets in a command line: `mask_forms`, and the values of variables with names of secrets."""
    text = mask_forms(text)
    return re.sub(
        r"\b(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<sign>=|: ?)(?P<value>[^\s,;'\"}]+)",
        lambda found: f"{found['name']}{found['sign']}{MASK}" if is_secret_name(found["name"]) else found[0],
        text,
    )
