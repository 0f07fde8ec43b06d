"""The orchestrator's side of a checkpoint: what is saved, in which files, and when.

Reading order: state → queue_file → follower.
"""
