"""Reach the processes of a running run: steps on its nodes, stacks and traces of its processes, panes with its logs.

Reading order: steps → stacks → profiles → engine_traces → panes.
"""
