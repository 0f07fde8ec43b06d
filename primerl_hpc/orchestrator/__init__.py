"""Drives environments against engines, scores, packs, ships to the trainer, and relays weights back.

Reading order. Pure: curriculum → sampler → dispatcher → concurrency → trajectories → algorithms → gates, filters →
scoring → packing → batches → metrics → evals.
At the edge: env_client → fleet → engines → runner → watcher → queue_file → checkpoints → traces → state →
setup → driver → loop, evaluate.
made_up: rollouts for the trainer's benchmark mode.
"""
