"""Files of a supervisor that no decision waits for.

Reading order: earlier_attempt → journal (writes, in a thread) → reserve (disk space for the failure report).
"""
