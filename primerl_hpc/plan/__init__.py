"""Compiles recipe and profile into a plan. Pure functions, no IO, no clock: same inputs, same bytes.

Reading order: types → planner (the list of passes) → split → env_servers, degrees → container → engine_env, env → bench (what
benchmark mode asks of a trainer).
"""
