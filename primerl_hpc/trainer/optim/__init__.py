"""Optimizers and learning-rate schedules.

Reading order: optimizers → muon → loss_scale.
"""
