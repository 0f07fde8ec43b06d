"""Show the state of runs from their files and one query to SLURM: on a login node, during a run and after its end.

Reading order: plot, text → table → log_files → merged_logs → rollouts, metric_catalog → follow → run_summary → chat.
Subfolders: status, inside, diagnose, report.
"""
