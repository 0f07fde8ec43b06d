"""Predictions for a plan: memory, time and balance of a run before it is in the queue. Pure functions without torch,
numpy, clock or files, except the data files of this package. Each result is a `figure.Figure`.

Reading order: figure (a value with its interval, formula and source) → layouts (inputs of all formulas) → shape and
its families (a model's config.json) → flops → hardware, curves → memory_activations → memory_trainer, memory_engine →
time_engine, time_trainer, time_transfer → ledger (what earlier runs say about a prediction, and the prediction in
plan.json). How trainer and engines wait for each other is in `plan.simulation`.
"""
