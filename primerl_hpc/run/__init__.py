"""The run directory: the contract between the processes of a run.

Reading order: rundir → step_dirs, leases → lock → endpoints, ports, rendezvous, calls → records, metrics, scores →
job_chain → registry. Subfolders: access (ownership and keys of a run), ledger (predicted
against measured figures).
"""
