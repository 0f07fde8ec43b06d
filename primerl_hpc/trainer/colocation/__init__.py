"""A trainer that shares its accelerators with engines: it asks for turns, and frees the memory between them.

Reading order: host_copy → turns.
"""
