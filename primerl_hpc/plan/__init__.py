"""Compiles recipe and profile into a plan. Pure functions, no IO, no clock: same inputs, same bytes.

Reading order: types → planner (the list of passes) → split → processes → engine_env → env → explain.
bench: what benchmark mode asks of a trainer.
"""
