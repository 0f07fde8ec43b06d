"""primerl-hpc: reinforcement learning of language models as SLURM batch jobs.

Read in the order of a user's story: cli (ask) → recipe (what) → cluster (where) → plan (compile) →
render (write) → launch (submit) → runtime (run) → roles → orchestrator | inference | trainer → observe (look).
Below them: common (foundation), slurm (the scheduler), run (the run directory), transport (what roles exchange).
"""

__version__ = "0.1.0"
