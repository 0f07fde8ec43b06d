"""The process on its node: CPUs next to its GPUs, compile caches, large imports, times of the start, and exit.

Reading order: binding, compile_caches, imports, transformers_folders, start_phases, exiting.
"""
