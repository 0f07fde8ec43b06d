"""Identity of the training rows, which a checkpoint stores next to the position: a position counts rows of this data.

    data = describe(sources)                        # [{"rows": 1000, "fingerprint": "5b1c…"}]
    check_same(progress.get("data"), data, paths, accepted=False)

A fingerprint covers the contents of 64 rows, at 16 places spread evenly over the source, and no times or names of
files: a copy is the same data. With the number of rows it detects what moves rows to other numbers (rows that were
added, removed, sorted or replaced) without reading a large file completely. A correction within a row that was not
sampled is not detected; it does not move other rows.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from typing import Any

from primerl_hpc.common.errors import DataError
from primerl_hpc.recipe.sft.tables import Rows, blocks_of

PLACES = 16
ROWS_PER_PLACE = 4  # neighbors, which Parquet stores in one row group
HINT = (
    "restore the data, or continue at the same position of the new data with primerl-hpc resume RUN "
    "--set checkpoint.accept_changed_data=true"
)


def describe(sources: Sequence[Rows]) -> list[dict[str, Any]]:
    """Return number of rows and fingerprint of each source, and the CRC-32 of the sizes of its Parquet row groups, on
    which the order depends. Raises DataError for a row that cannot be read."""
    return [
        {"rows": len(rows), "fingerprint": fingerprint(rows)}
        | ({"row_groups": zlib.crc32(repr(blocks).encode())} if (blocks := blocks_of(rows)) else {})
        for rows in sources
    ]


def fingerprint(rows: Rows) -> str:
    """Return 16 hexadecimal digits that depend on the sampled rows and their numbers."""
    digest = hashlib.sha256()
    for index in sampled_rows(len(rows)):
        values = json.dumps(rows[index].values, sort_keys=True, default=lambda value: type(value).__name__)
        digest.update(f"{index} {values}\n".encode())
    return digest.hexdigest()[:16]


def sampled_rows(count: int) -> list[int]:
    """Return the numbers of the sampled rows, the first and the last among them."""
    last = max(0, count - ROWS_PER_PLACE)
    starts = {round(place * last / (PLACES - 1)) for place in range(PLACES)}
    return sorted({row for start in starts for row in range(start, min(start + ROWS_PER_PLACE, count))})


def check_same(saved: object, now: list[dict[str, Any]], paths: Sequence[str], *, accepted: bool) -> str:
    """Compare the data with that of a checkpoint; return a line about what changed, empty if nothing did.

    ``saved``: from `describe`; None in checkpoints of earlier versions, which are accepted. ``accepted``: whether
    changed data is. Raises DataError that names the source.
    """
    if not isinstance(saved, list):
        return ""
    changes = [
        (path, _change(before, after))
        for path, before, after in zip(paths, saved, now, strict=False)
        if before != after
    ]
    if len(saved) != len(now):
        changes = [(", ".join(paths), f"there are {len(now)} sources, {len(saved)} at the checkpoint")]
    if not changes:
        return ""
    path, cause = changes[0]
    if not accepted:
        raise DataError(f"the data changed after the checkpoint: {cause}", location=path, hint=HINT)
    return f"{path}: {cause}"


def _change(before: dict[str, Any], after: dict[str, Any]) -> str:
    if before["rows"] != after["rows"]:
        return f"{after['rows']:,} rows, {before['rows']:,} at the checkpoint"
    if before["fingerprint"] == after["fingerprint"]:
        return "the same rows are in other Parquet row groups, or in a file of another format"
    return f"of {after['rows']:,} rows, some have other contents or another order"
