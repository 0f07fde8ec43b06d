"""The process on its node: CPUs next to its GPUs, filesystems, compile caches, large imports, its start and exit.

Reading order: binding, filesystems, compile_caches, imports, transformers_folders, start_phases, exiting.
"""
