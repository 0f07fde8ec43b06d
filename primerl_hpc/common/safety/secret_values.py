"""Detect and mask secrets: by the name of their variable, and by the form of their value.

    is_secret("DB_PASS", "hunter2")                 # True because of the name
    is_secret("X", "hf_" + 34 * "a")                # True: the value has the form of a Hugging Face token
    is_secret("OPTS", "--token=abc")                # True: an option in the value has such a name
    mask("curl -H 'Authorization: Bearer abc'")     # "curl -H 'Authorization: Bearer ***'"
    mask_data({"args": {"api_key": "abc"}})         # {"args": {"api_key": "***"}}

A secret in a recipe or profile would be copied to plan.json, recipe.yaml, reports and trackers, so it is rejected.
Variables are passed by name instead: ``env: {HF_TOKEN: {from: HF_TOKEN}}``. Everything that leaves the run directory
(trackers, reports, the command line in provenance.json) is masked with `mask` or `mask_data`.

Forms are those of CredSweeper (secret_forms.json, written by tools/secret_forms), and the few below that it lacks.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import resources
from typing import Any

MASK = "***"
_NAMES = re.compile(
    r"(TOKEN|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|PASSCODE|CREDENTIALS?|(^|_)CREDS?|(^|_)JWT|(^|_)AUTH(ORIZATION)?"
    r"|(API|ACCESS|AUTH|PRIVATE|SECRET|ENCRYPTION|SIGNING|SSH|ACCOUNT|SERVICE|LICENSE)_?KEY)(_|$)"
    r"|(?<!BY)(?<!COM)(?<!ASK)PASS(_?\d+)?$|(?<!^OLD)(?<!^)PWD$|PW(_?\d+)?$"
)
"""Names in upper case. Short words count at the end of a name only: ``PASS_RATE`` is no password."""
_VARIABLE_NAMES = re.compile(r"(?<!PUBLIC)(?<!PUB)_KEY$")
"""The same for names that are written in upper case, which are those of variables."""
_NOT_SECRET = re.compile(
    r"_(FILE|PATH|DIR|VAR|VARIABLE|ENV|NAME|TYPE|URL|URI|ENDPOINT|HOST|PORT|USER|USERNAME|SIZE|LENGTH|COUNT)$"
)
"""Names of files, of variables, and of settings about tokens."""
_PLAIN = re.compile(r"true|false|yes|no|on|off|none|null|auto|default|\d{1,3}|[$<{\[(`%*|>].*", re.I | re.S)
"""Values that are no secrets under any name: settings, references (``$HF_TOKEN``) and control tokens."""
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?(e[-+]?\d+)?", re.I)
_PASSWORD = re.compile(r"PASS|PWD|PW")
_HEX_40 = re.compile(r"[0-9a-f]{40}")
"""API keys of W&B before 2026, and commits."""
_COMMIT = re.compile(r"(^|_)(COMMIT|SHA1?|REV|REVISION|REF|HASH|DIGEST|CHECKSUM|VERSION|TAG|BRANCH|ID)(_|$)")
_OWN_FORMS = (
    (("hf_", "api_org_"), r"\b(?P<value>(hf|api_org)_[A-Za-z0-9]{20,})"),  # Hugging Face
    (("wandb_v",), r"\b(?P<value>wandb_v\d_\w{20,})"),
    (("login",), r"wandb login (--\S+ )*(?P<value>[0-9a-f]{40})\b"),
    (("pit_",), r"\b(?P<value>pit_[A-Za-z0-9]{20,})"),  # Prime Intellect
    (("sk-",), r"\b(?P<value>sk-[A-Za-z0-9_-]{20,})"),  # OpenAI and servers with its interface
    (("nvapi-",), r"\b(?P<value>nvapi-[\w-]{20,})"),
    (("r8_",), r"\b(?P<value>r8_[A-Za-z0-9]{20,})"),  # Replicate
    (("k_live_", "k_test_"), r"\b(?P<value>[prs]k_(live|test)_[A-Za-z0-9]{10,})"),  # Stripe
    (("aiza",), r"\b(?P<value>AIza[\w-]{30,})"),  # Google
    (("gh", "glpat-"), r"\b(?P<value>(gh[pousr]_|github_pat_|glpat-)[\w-]{20,})"),
    (("akia",), r"\b(?P<value>AKIA[0-9A-Z]{16})\b"),  # AWS
    (("eyj",), r"\b(?P<value>eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"),  # JSON web tokens
    (("private key",), r"(?P<value>-----BEGIN [A-Z ]*PRIVATE KEY-----([\w\s/+=]*-----END [A-Z ]*KEY-----)?)"),
    (("://",), r"://(?P<value>[^/\s:@]*:[^/\s:@]+)@"),  # a password in a URL
)
"""Forms that CredSweeper lacks or knows in a narrower form: (texts in lower case, one of which it has, expression)."""
_SHORTEST = 13
"""Characters of the shortest text with the form of a secret: ``x://:y@host``."""
_ASSIGNMENT = re.compile(
    r"(?P<name>(?<!\w)[A-Za-z_][\w-]*+)(?P<sign>[\"']?(=|:\s?)\s?[\"']?((Bearer|Basic|Token) )?)"
    r"(?P<value>[^\s,;'\"}&]+)"
)
"""``TOKEN=abc``, ``"token": "abc"``, ``token: abc``, ``--token=abc``, ``?token=abc&…``, ``Authorization: Basic a``"""
_OPTION = re.compile(r"(?P<name>(?<!\S)--[A-Za-z][\w-]*)(?P<sign> +[\"']?)(?P<value>[^\s'\"-][^\s'\"]*)")
"""``--token abc``"""


def is_secret_name(name: str) -> bool:
    """True if a variable, key or option of this name contains a secret."""
    upper = _upper(name)
    if _NOT_SECRET.search(upper):
        return False
    return _NAMES.search(upper) is not None or (name.isupper() and _VARIABLE_NAMES.search(upper) is not None)


def is_secret(name: str, value: str) -> bool:
    """True if the variable's name, the form of its value, or an assignment in it indicates a secret."""
    return is_named_secret(name, value) or mask(value) != value


def is_named_secret(name: str, value: str) -> bool:
    """True if ``value`` is the secret that ``name`` indicates. False for settings, and for numbers unless the name is
    that of a password. 40 hexadecimal digits are a key unless the name is that of a commit."""
    if not value or _PLAIN.fullmatch(value):
        return False
    if _HEX_40.fullmatch(value):
        return bool(name) and not _COMMIT.search(_upper(name))
    is_number = _NUMBER.fullmatch(value) and not _PASSWORD.search(_upper(name))
    return not is_number and is_secret_name(name)


def has_secret_form(text: str) -> bool:
    """True if a part of ``text`` has the form of a token, a key or a URL with a password."""
    return _mask_forms(text) != text


def mask(text: str) -> str:
    """Mask everything in ``text`` that has the form of a secret, and the values of names that indicate one."""
    text = _mask_forms(text)
    return _mask_assignments(_mask_assignments(text, _ASSIGNMENT), _OPTION)


def mask_data(value: Any, name: str = "") -> Any:
    """Return nested data (mappings, lists, texts) with secrets masked. ``name``: the key that has this value."""
    if isinstance(value, dict):
        return {key: mask_data(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        # the words of a command: the value of an option may be the next one
        options = ["", *(word if isinstance(word, str) and word.startswith("--") else "" for word in value)]
        return [
            mask_data(inner, name if option == "" or str(inner).startswith("-") else option)
            for option, inner in zip(options, value, strict=False)
        ]
    if isinstance(value, str):
        return MASK if is_named_secret(name, value) else mask(value)
    return value


def _upper(name: str) -> str:
    """Return ``name`` as a variable is written: ``apiKey`` and ``--api-key`` as ``API_KEY``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").replace(".", "_").strip("_").upper()


def _mask_assignments(text: str, pattern: re.Pattern[str]) -> str:
    parts, done, start = [], 0, 0
    while (found := pattern.search(text, start)) is not None:
        start = found.start("value")  # it may contain another assignment: OPTS=--token=abc
        if is_named_secret(found["name"], found["value"]) and not _is_in_sentence(found):
            parts += [text[done:start], MASK]
            done = start = found.end("value")
    return "".join((*parts, text[done:]))


def _is_in_sentence(found: re.Match[str]) -> bool:
    """True for ``the loss of a token: a few values``: a plain word, which another word precedes on its line."""
    if found["sign"] != ": " or not (found["name"].islower() and found["name"].isalpha()):
        return False
    before = found.string[max(0, found.start() - 80) : found.start()].rpartition("\n")[2].rstrip(" -")
    return before[-1:].isalnum()


def _mask_forms(text: str) -> str:
    # only long words can be secrets; with the words before them they are a small part of a text
    words = text.split()
    long_words = [
        f"{word} {after}" for word, after in zip(["", *words], words, strict=False) if len(after) >= _SHORTEST
    ]
    searched = " ".join(long_words).lower()
    if "PRIVATE KEY" in text:
        searched += " private key"
    for required, pattern in _forms():
        if any(part in searched for part in required):
            text = re.sub(pattern, _mask_group, text)
    return text


def _mask_group(found: re.Match[str]) -> str:
    start, end = found.start("value") - found.start(), found.end("value") - found.start()
    return f"{found[0][:start]}{MASK}{found[0][end:]}"


@cache
def _forms() -> tuple[tuple[tuple[str, ...], str], ...]:
    """Return all forms; `re` compiles an expression when a text has one of its required parts."""
    file = resources.files("primerl_hpc.common.safety") / "secret_forms.json"
    kept = json.loads(file.read_text(encoding="utf-8"))["forms"]
    listed = [(tuple(text.lower() for text in form["contains"]), form["pattern"]) for form in kept]
    return (*_OWN_FORMS, *listed)
