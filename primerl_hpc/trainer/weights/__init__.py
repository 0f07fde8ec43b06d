"""Publishes policy versions to the engines: as folders, as deltas, or by broadcast.

Reading order: publisher → shards → filesystem → peft_targets → delta → broadcast.
"""
