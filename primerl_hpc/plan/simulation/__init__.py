"""Simulate how engines and trainer of an asynchronous RL run wait for each other. Pure Python, deterministic by seed.

Reading order: lengths → sides → requests → simulate → advisor (a faster split of the nodes from measured rates).
"""
