"""What every other folder may use: errors, files, the run directory, names, time, assets. Imports nothing heavy.

Reading order: errors → names → env → files, lock, leases → rundir → rendezvous, listen, restart_requests, long_call → events,
metrics, scores → assets, registry, importing → yamldoc, block, validate (YAML to blocks) → slurm, sbatch, chain → patience,
tail, log → chatml.
"""
