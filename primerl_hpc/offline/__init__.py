"""Preparation on a login node of everything a run loads: models and data, a Python environment, its code.

Subfolders: prefetch (fills caches, and refuses runs that would miss something), bundle (an environment as one file),
code (the copy of the code that a run executes).
"""
