"""Looks at runs, from files alone: works on a login node, on a dead run, and while one is running.

Reading order: snapshot (what a run is doing) → status, follow, logs, diagnose (ways of showing it) → plot.
"""
