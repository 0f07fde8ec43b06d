"""The process on its node: CPUs next to its GPUs, limits, compile caches, large imports, its start and exit.

Reading order: binding, limits, compile_caches, imports, transformers_folders, start_phases, exiting.
"""
