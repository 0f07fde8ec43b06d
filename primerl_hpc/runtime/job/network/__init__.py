"""Measurements between the nodes of a job: can they connect, and how fast are their network and their files?

Reading order: schedule (pure) → reach → bandwidth → probe, the program on each node → step.
"""
