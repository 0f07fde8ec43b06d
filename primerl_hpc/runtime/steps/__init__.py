"""Processes of the plan as child processes or as SLURM steps, each under a guard.

Reading order: local → srun → guard → oom → stacks → bundle (the Python environment on each
node).
"""
