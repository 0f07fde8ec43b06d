"""Decides which rollout starts next. Pure: no clock and no I/O.

Reading order: curriculum → sampler → dispatcher → rate_limit → concurrency.
"""
