"""Rows of Arrow tables: Parquet files, and datasets of package ``datasets``.

Arrow gives all mappings of a column the union of their keys. A key that a row does not have is null there, at any
depth: a call of one tool seems to have the arguments of all others. `without_filled_nulls` removes these nulls. They
cannot be distinguished from a null that the author of the row wrote, except in a list (``enum: [null, "a"]``), to which
Arrow adds nothing.
"""

from __future__ import annotations

from typing import Any

from primerl_hpc.recipe.sft.rows import Row


def without_filled_nulls(value: Any, arrow_type: Any) -> Any:
    """Return a value of an Arrow type without the keys of its mappings that are null; nulls in lists remain.

    Values of other types, such as JSON, are returned as they are.
    """
    import pyarrow.types as kinds

    if isinstance(value, dict) and kinds.is_struct(arrow_type):
        types = {field.name: field.type for field in arrow_type}
        return {
            key: without_filled_nulls(item, types[key]) for key, item in value.items() if item is not None
        }
    is_list = any(
        check(arrow_type) for check in (kinds.is_list, kinds.is_large_list, kinds.is_fixed_size_list)
    )
    if isinstance(value, list) and is_list:
        return [without_filled_nulls(item, arrow_type.value_type) for item in value]
    return value


def make_row(location: str, values: dict[str, Any], schema: Any) -> Row:
    """Return a row of a table with an Arrow schema."""
    return Row(
        location,
        {
            column: without_filled_nulls(value, schema.field(column).type)
            for column, value in values.items()
            if value is not None
        },
    )


class ArrowRows:
    """The rows of a Parquet file, as an Arrow table."""

    def __init__(self, location: str, table: Any) -> None:
        self.location, self.table = location, table

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, index: int) -> Row:
        values = self.table.slice(index, 1).to_pylist()[0]
        return make_row(f"{self.location}:{index + 1}", values, self.table.schema)


class TableRows:
    """The rows of a dataset of package ``datasets``, which memory-maps it."""

    def __init__(self, location: str, table: Any) -> None:
        self.location, self.table = location, table
        self._schema = table.features.arrow_schema

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Row:
        return make_row(f"{self.location}:{index + 1}", self.table[index], self._schema)
