"""The batch process of a run: start all processes, restart them after failures, end with the job's exit code.

Reading order: step → supervisor → context → phase → phase_files → policy (pure) → process_state → failures →
watchdog → step_history → allocation → elastic_members → engine_host (engines in jobs of their own). Subfolders: files
(writes to the run directory), job (what SLURM grants and reclaims), steps (how one process runs).
"""
