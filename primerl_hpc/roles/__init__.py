"""Entry points of a run's processes: one thin module per role, run as ``python -m primerl_hpc.roles.<role>``."""
