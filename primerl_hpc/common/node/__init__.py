"""The process on its node: CPUs next to its GPUs, compile caches, large imports, its start and exit.

Reading order: binding, compile_caches, imports, transformers_folders, start_phases, exiting.
"""
