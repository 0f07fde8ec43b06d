"""Durations: engines, trainer and weight updates. Every result is a `figure.Figure` in seconds.

Reading order: curves (utilization of a GPU type and times of single operations) → network (collectives between nodes),
layers → time_engine → time_trainer → time_transfer → calibrated (measurements of `calibrate`);
host_cores (CPU time of rollouts).
"""
