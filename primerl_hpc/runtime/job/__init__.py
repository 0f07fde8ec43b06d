"""The job's resources: nodes, walltime, requeue, chains.

Reading order: nodes → node_checks, gpu_checks, environment_checks → preflight → sums → network → no_proxy → walltime →
chain → requeue → handoff → auto_split.
"""
