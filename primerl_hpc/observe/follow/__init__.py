"""`submit --follow` and `resume --follow`: a run as it happens, and its summary at the end.

Reading order: follow → summary.
"""
