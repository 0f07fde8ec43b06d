"""Inference engines in SLURM jobs of their own, which join and leave a running run.

Reading order: members → engine_host.
"""
