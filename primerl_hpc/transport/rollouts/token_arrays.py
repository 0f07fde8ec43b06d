"""Sampled tokens as bytes: the response of an engine to a request for tokens as arrays.

    body = encode(SampledTokens([5, 7], [-0.1, -2.5], {"finish_reason": "stop"}))
    decode(body).token_ids                            # [5, 7]

Layout, little-endian: length of the header (uint32), header (a JSON object), token ids (int32 each), log-probabilities
(float32 each, vLLM's precision). A client asks for it with ``Accept: application/x-primerl-tokens``; a server that does
not know the type responds with JSON.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from dataclasses import dataclass, field
from typing import Any

MEDIA_TYPE = "application/x-primerl-tokens"
_LENGTH = struct.Struct("<I")
_ITEM_BYTES = 4


@dataclass(frozen=True)
class SampledTokens:
    token_ids: list[int]
    logprobs: list[float]
    """One for each token."""
    header: dict[str, Any] = field(default_factory=dict)
    """Other fields of the response: ``request_id``, ``finish_reason``, …"""


def encode(tokens: SampledTokens) -> bytes:
    """Return the bytes of a response. Raises ValueError if ids and log-probabilities differ in number."""
    if len(tokens.token_ids) != len(tokens.logprobs):
        raise ValueError(f"{len(tokens.token_ids)} tokens but {len(tokens.logprobs)} log-probabilities")
    header = json.dumps(tokens.header, separators=(",", ":")).encode()
    arrays = [array("i", tokens.token_ids), array("f", tokens.logprobs)]
    return b"".join((_LENGTH.pack(len(header)), header, *(_little_endian(part) for part in arrays)))


def decode(body: bytes) -> SampledTokens:
    """Return the tokens of a response. Raises ValueError if the bytes are not one."""
    if len(body) < _LENGTH.size:
        raise ValueError(f"a response of {len(body)} bytes has no header")
    start = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    count, rest = divmod(len(body) - start, 2 * _ITEM_BYTES)
    if count < 0 or rest:
        raise ValueError(
            f"a response of {len(body)} bytes with a header of {start - _LENGTH.size} is incomplete"
        )
    header = json.loads(body[_LENGTH.size : start])
    if not isinstance(header, dict):
        raise ValueError("the header of a response is not a JSON object")
    middle = start + count * _ITEM_BYTES
    ids, logprobs = array("i", body[start:middle]), array("f", body[middle:])
    if sys.byteorder == "big":
        ids.byteswap()
        logprobs.byteswap()
    return SampledTokens(ids.tolist(), logprobs.tolist(), header)


def _little_endian(numbers: array[Any]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
