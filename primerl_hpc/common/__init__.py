"""Helpers that every other folder may use. None of them imports a heavy library.

Reading order: errors → names → env → passed → package → files → locks → model_families, model_files → assets,
importing → document, block, validate (YAML to frozen blocks) → waiting → interpreters, answers (calls in other Python
interpreters) → log. Subfolders: safety (untrusted text and data), node (CPUs next to GPUs).
"""
