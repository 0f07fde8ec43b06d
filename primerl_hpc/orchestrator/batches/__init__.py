"""Batches for the trainer. Pure: no clock and no I/O.

Reading order: batcher → packing → synthetic.
"""
