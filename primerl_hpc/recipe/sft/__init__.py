"""Rows of supervised fine-tuning data: their columns, and the files and datasets that hold them.

Reading order: rows (one row) → folders (files of a split) → arrow (Parquet, datasets) → tables (files, saved datasets,
the hub).
"""
