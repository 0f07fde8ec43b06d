"""Layers of a model from its config.json, one table entry per family. Names of modules are those of transformers.

Reading order: parts (a matrix, a layer) → config_reader (checked values) → attention, feedforward, vision → families
(the table: add a family here) → activations (what a block keeps for backward).
"""
