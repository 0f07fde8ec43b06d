"""Predicted against measured: the metric that measures a figure, and the ledger files.

Reading order: measures (figure → metric) → rows (one row of a ledger) → store (the file of a run, the file of a user).
attempts: durations of the attempts.
"""
