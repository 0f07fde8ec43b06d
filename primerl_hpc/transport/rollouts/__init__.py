"""Training batches sent from the orchestrator to the trainer, and sampled tokens sent from engines to rollouts.

Reading order: micro_batch → pictures → filesystem → token_arrays.
"""
