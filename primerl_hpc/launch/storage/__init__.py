"""Size, pruning, archives and replacement of run directories. For the owner alone; a run in use is only measured.

Reading order: usage → prune → archive → clear → overwrite.
"""
