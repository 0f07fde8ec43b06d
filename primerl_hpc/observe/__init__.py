"""Looks at runs, from files and one question to SLURM: works on a login node, on a dead run, and while one is running.

Reading order: snapshot (what a run is doing) with bottleneck and forecast → slurm (asked politely) → catalog (all runs) →
table, depth, screen (`status`) → usage → logfiles, logs → diagnose with patterns and reasons → follow, summary →
scores, samples, chat (what the policy is worth, and says) → report with svg → plot, text.
"""
