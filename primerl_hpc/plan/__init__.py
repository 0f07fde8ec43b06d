"""Compile recipe and profile into a plan. Pure functions without I/O or clock: equal inputs give equal bytes.

Reading order: plan → planner (the list of passes) → pools, split, components → env_servers, degrees → container →
engine_env, env → preflight → bench_plans (requests of benchmark mode). Folders: `predict` (memory and time of trainer
and engines), `simulation` (how they wait for each other), `assess` (does a plan fit, how long does it take, ``auto``).
"""
