"""Select the engine for a request. Pure: requests in, engines out; no clock, no I/O.

    balancer = Balancer("prefix", slack=8)
    engine = balancer.choose(["https://a:1", "https://b:1"], session="rollout 3", body=b'{"token_ids": [1, 2, …')
    balancer.begin(engine); …; balancer.end(engine)

``session``: all requests of a session go to one engine, selected by rendezvous hashing (Thaler and Ravishankar 1998),
so that few sessions move when an engine joins or leaves. ``prefix``: a request goes to the engine that served the
longest prefix of its prompt, because the KV blocks are cached there, unless that engine has more requests in flight
than the least busy one by more than ``slack`` and more than a tenth. A prompt without a known prefix goes to the
least busy engine. Prompts are compared as bytes of the request's JSON, so that bodies need not be parsed.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

BLOCK_BYTES = 256
"""Size of a block of JSON: about 50 token ids."""
MAX_BLOCKS = 4096
"""Maximum number of blocks that are compared per prompt."""
REMEMBERED_BLOCKS = 1 << 18
"""Capacity of the least recently used (LRU) cache of served blocks: about 40 MB."""
MATCH_SHARE = 0.5
"""Minimum share of a prompt's blocks that a prefix must cover to count, so that a shared system prompt does not."""
RELATIVE_SLACK = 1.1
_PROMPT = re.compile(rb'"(?:token_ids|prompt|messages)"\s*:\s*')


class Balancer:
    def __init__(self, routing: str, slack: int) -> None:
        """``routing``: ``prefix`` or ``session``; ``slack``: extra requests that an engine with the prefix may have."""
        self.routing, self.slack = routing, slack
        self.in_flight: Counter[str] = Counter()
        self._served: OrderedDict[tuple[int, int], str] = OrderedDict()

    def choose(self, engines: Sequence[str], *, session: str | None, body: bytes) -> str | None:
        """Return one of ``engines``; None if it is empty."""
        if not engines:
            return None
        if self.routing == "session":
            if session is None:
                return self._least_busy(engines)
            return max(engines, key=lambda engine: _weight(session, engine))
        blocks = list(prompt_blocks(body))
        engine = self._with_prefix(engines, blocks) or self._least_busy(engines)
        self._remember(blocks, engine)
        return engine

    def begin(self, engine: str) -> None:
        """Count a request in flight."""
        self.in_flight[engine] += 1

    def end(self, engine: str) -> None:
        """Stop counting a request that ended."""
        self.in_flight[engine] -= 1
        if not self.in_flight[engine]:
            del self.in_flight[engine]

    def _least_busy(self, engines: Sequence[str]) -> str:
        return min(engines, key=lambda engine: (self.in_flight[engine], zlib.crc32(engine.encode())))

    def _with_prefix(self, engines: Sequence[str], blocks: list[tuple[int, int]]) -> str | None:
        """Return the engine that served at least `MATCH_SHARE` of the prompt; None if it is unknown or too busy."""
        shortest = max(1, round(len(blocks) * MATCH_SHARE))
        for block in reversed(blocks[shortest - 1 :]):
            engine = self._served.get(block)
            if engine is not None and engine in engines:
                return None if self._is_too_busy(engine, engines) else engine
        return None

    def _is_too_busy(self, engine: str, engines: Sequence[str]) -> bool:
        least, own = min(self.in_flight[other] for other in engines), self.in_flight[engine]
        return own - least > self.slack and own > RELATIVE_SLACK * least

    def _remember(self, blocks: list[tuple[int, int]], engine: str) -> None:
        for block in blocks:
            self._served[block] = engine
            self._served.move_to_end(block)
        while len(self._served) > REMEMBERED_BLOCKS:
            self._served.popitem(last=False)


def _weight(session: str, engine: str) -> bytes:
    """Return the rendezvous weight of an engine.

    A CRC would not do: it is linear, so the order of engines would be correlated between sessions.
    """
    return hashlib.blake2b(f"{session} {engine}".encode(errors="surrogatepass"), digest_size=8).digest()


def prompt_blocks(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield (position, checksum of the prompt up to its end) of each complete block of the prompt in a JSON body."""
    match = _PROMPT.search(body)
    if match is None:
        return
    checksum, start = 0, match.end()
    for position in range(min((len(body) - start) // BLOCK_BYTES, MAX_BLOCKS)):
        checksum = zlib.crc32(body[start : start + BLOCK_BYTES], checksum)
        start += BLOCK_BYTES
        yield position, checksum
