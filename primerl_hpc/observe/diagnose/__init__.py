"""`diagnose`: why a run failed or waits, and whether another attempt can succeed.

Reading order: known_faults → advice → diagnose.
"""
