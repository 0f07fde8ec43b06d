"""Benchmark mode: roles and the complete loop on synthetic data; and measurements of a node for the planner.

Reading order: local (the trainer) → job → target (what is measured) → loop (engines, orchestrator, complete loop) →
loop_rates (their figures, pure) → tables (the results as text) → calibrate.
"""
