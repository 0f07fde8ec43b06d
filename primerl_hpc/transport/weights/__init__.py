"""Policy versions sent from the trainer to the engines.

Reading order: types → filesystem → best → delta_codec → delta → broadcast_group → broadcast.
"""
