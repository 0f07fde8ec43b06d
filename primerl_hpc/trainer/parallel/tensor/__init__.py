"""Tensor parallelism: the matrices of attention, MLPs and vocabulary are divided among the ranks of ``tensor``.

Reading order: tokens (between norms, each rank has a part of the tokens) → layers (divided matrices) → divide (which
matrices of a model, by its plan).
"""
