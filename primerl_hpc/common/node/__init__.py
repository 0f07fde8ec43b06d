"""The process on its node: the CPUs next to its GPUs, its compile caches, the times of its start, and its exit.

Reading order: binding, compile_caches, imports, start_phases, exiting.
"""
