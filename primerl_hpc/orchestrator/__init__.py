"""Drives environments and engines, scores rollouts, sends batches to the trainer and new weights to the engines.

Reading order: rollout_data → train_loop, eval_loop → components → driver → setup → metrics, progress → evaluation →
event_loop. Subfolders in the order of the data: scheduling → rollouts → algorithms, scoring → batches; engines;
checkpoint.
"""
