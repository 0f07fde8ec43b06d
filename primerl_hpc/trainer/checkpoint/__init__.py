"""The trainer's side of a checkpoint: reading and the format, then writing.

Reading order: checkpoint → saver.
"""
