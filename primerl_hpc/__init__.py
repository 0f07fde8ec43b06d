"""primerl-hpc: reinforcement learning of language models as SLURM batch jobs.

Read in the order of a user's story: cli (ask) → recipe (what) → cluster (where) → plan (compile) →
render (write) → launch (submit) → runtime (run) → roles → orchestrator | inference | trainer → observe (look).
"""

__version__ = "0.1.0"
