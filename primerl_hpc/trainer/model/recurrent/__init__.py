"""Layers that carry state along a row.

Reading order: by_sample (each sample of a packed row starts with an empty state) → shared_rows (context parallelism:
each rank has a part of the tokens, or of the heads).
"""
