"""Tool server of environment ``local-search``: full-text search (SQLite's FTS5, BM25) in an invented encyclopedia."""

from __future__ import annotations

import re
import sqlite3

import verifiers.v1 as vf
from pydantic import Field

from primerl_hpc.envs.tool_servers.encyclopedia import write_articles

MAX_RESULTS = 5
MAX_QUERY_WORDS = 16


class SearchConfig(vf.SharedToolsetConfig):
    num_articles: int = Field(default=400, ge=2, le=100_000)
    seed: int = 0


class Index:
    """Articles of the encyclopedia in a SQLite database in memory."""

    def __init__(self, num_articles: int, seed: int) -> None:
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.execute("CREATE VIRTUAL TABLE articles USING fts5(title, text)")
        rows = [(town.name, town.text) for town in write_articles(num_articles, seed)]
        self._database.executemany("INSERT INTO articles VALUES (?, ?)", rows)

    def search(self, query: str) -> list[str]:
        """Return the texts of at most `MAX_RESULTS` articles with any word of the query, best first."""
        words = re.findall(r"\w+", query)[:MAX_QUERY_WORDS]
        if not words:
            return []
        found = self._database.execute(
            "SELECT text FROM articles WHERE articles MATCH ? ORDER BY rank LIMIT ?",
            (" OR ".join(f'"{word}"' for word in words), MAX_RESULTS),
        )
        return [text for (text,) in found]


class SearchTools(vf.Toolset[SearchConfig]):
    TOOL_PREFIX = None

    # the model sees the docstrings of the tools
    @vf.tool
    def search(self, query: str) -> str:
        """Search the encyclopedia for words. Returns the best articles."""
        if not hasattr(self, "_index"):
            self._index = Index(self.config.num_articles, self.config.seed)
        return "\n\n".join(self._index.search(query)) or "no article contains these words"


if __name__ == "__main__":
    SearchTools.run()
