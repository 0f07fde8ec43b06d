"""Policy versions sent from the trainer to the engines.

Reading order: sources → filesystem → best → delta_codec → delta → broadcast_group → broadcast.
"""
