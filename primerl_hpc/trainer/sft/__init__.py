"""Supervised data as packed rows: tokens of a row, order of rows, batches.

Reading order: checks (rows that are refused) → tokens → mixture → stream → identity (of the data in a checkpoint).
"""
