"""`logs`: find the log files of a run and merge their lines by time.

Reading order: log_files → merge.
"""
