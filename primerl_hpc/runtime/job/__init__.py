"""The job's resources: nodes, walltime, requeue, chains.

Reading order: nodes → preflight → no_proxy → walltime → chain → requeue → handoff → auto_split.
"""
