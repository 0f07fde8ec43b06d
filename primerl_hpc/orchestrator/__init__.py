"""Drives environments against engines, scores, packs, ships to the trainer, and relays weights back.

Reading order. Pure: sampler → dispatcher → trajectories → algorithms → packing → batches → metrics → evals.
At the edge: env_client → fleet → runner → watcher → checkpoints → traces → setup → driver → loop, evaluate.
"""
