"""What each process of a run does at start: one thin module per role, run as `python -m primerl_hpc.roles.<role>`."""
