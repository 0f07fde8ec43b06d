"""Show the state of runs from their files and one query to SLURM: on a login node, during a run and after its end.

Reading order: plot, text → table → rollouts, metric_catalog → chat. Subfolders: status, logs, inside,
diagnose, follow, report.
"""
